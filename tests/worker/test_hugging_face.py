"""Each reason why a model of transformers cannot be built has a message that says what to do."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from gradbox_worker.errors import ModelsFileError
from gradbox_worker.models.builders import build_model
from tests.worker.test_builders import POINTER, entry, minilm_folder


def copied(folder: Path, **config: Any) -> Path:
    """A folder with MiniLM's weights, and its configuration changed."""
    os.link(minilm_folder() / "model.safetensors", folder / "model.safetensors")
    document = json.loads((minilm_folder() / "config.json").read_text()) | config
    (folder / "config.json").write_text(json.dumps(document))
    return folder


def without_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def pickled(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def without_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def cut_short(folder: Path) -> None:
    content = (folder / "model.safetensors").read_bytes()[:100_000]
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").write_bytes(content)


def not_fetched(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").write_bytes(POINTER)


def not_json(folder: Path) -> None:
    (folder / "config.json").write_text("{")


@pytest.mark.parametrize(
    ("spoil", "config", "says"),
    [
        (without_config, {}, r"holds no config\.json; copy what model\.save_pretrained"),
        (pickled, {}, r"only pickled weights \(pytorch_model\.bin\); load it where you trust it"),
        (without_weights, {}, r"found no weights; copy model\.safetensors"),
        (cut_short, {}, r"SafetensorError: .*check kwargs, config\.json and the safetensors"),
        (not_fetched, {}, r"model\.safetensors is a git-lfs pointer: .*git lfs pull"),
        (not_json, {}, "to be a JSON object"),
        (None, {"model_type": "zebra"}, r"model_type 'zebra'; pip install --upgrade transformers"),
        (None, {"model_type": None}, r"no model_type"),
        (None, {"hidden_size": 24, "intermediate_size": 48},
         r"embeddings.LayerNorm.bias \(file \(384,\), model \(24,\)\).*and \d+ more"),
        (None, {"model_type": "gpt2"}, "none of their names are its own"),
    ],
)  # fmt: skip
def test_a_folder_that_gives_no_model_says_why(
    tmp_path: Path, spoil: Callable[[Path], None] | None, config: dict[str, Any], says: str
) -> None:
    folder = copied(tmp_path, **config)
    if spoil is not None:
        spoil(folder)
    with pytest.raises(ModelsFileError, match=says):
        build_model(entry("hf", str(folder)))


def test_a_checkpoint_file_is_refused_with_the_line_that_converts_it(tmp_path: Path) -> None:
    (tmp_path / "model.ckpt").write_bytes(b"\x80\x04N.")
    with pytest.raises(ModelsFileError, match=r"got a file; .*save_file\(.*model\.safetensors"):
        build_model(entry("hf", "model.ckpt", folder=tmp_path))


def test_a_name_that_is_not_in_the_cache_says_how_to_bring_it_here() -> None:
    with pytest.raises(ModelsFileError, match=r"HF_HUB_OFFLINE=1 keeps .*`hf download no/such"):
        build_model(entry("hf", "no/such"))


def test_a_name_of_the_cache_builds_without_the_hub(tmp_path: Path) -> None:
    revision = "0" * 40
    snapshot = tmp_path / "models--org--minilm" / "snapshots" / revision
    snapshot.mkdir(parents=True)
    for name in ("config.json", "model.safetensors"):
        shutil.copy(minilm_folder() / name, snapshot)
    refs = tmp_path / "models--org--minilm" / "refs"
    refs.mkdir()
    (refs / "main").write_text(revision)
    model = build_model(entry("hf", "org/minilm", kwargs={"cache_dir": str(tmp_path)}))
    assert type(model).__name__ == "BertModel"


class Hub(BaseHTTPRequestHandler):
    """Answers as the hub does for names that it does not give."""

    def do_HEAD(self) -> None:
        owner = self.path.split("/")[1]
        status, code = {
            "gated": (403, "GatedRepo"),
            "unknown": (404, "RepoNotFound"),
            "pickled": (404, "EntryNotFound"),
        }[owner]
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("X-Error-Message", f"{owner}: no")
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_GET = do_HEAD  # noqa: N815  # http.server looks it up by this name

    def log_message(self, *_: object) -> None: ...


@pytest.fixture(scope="module")
def hub_answers() -> Any:
    """What three names are refused with by a box that reaches a hub; one process for all."""
    code = (
        "import json, sys; from gradbox_worker.errors import ModelsFileError; "
        "from gradbox_worker.models.builders import build_model; "
        "from tests.worker.test_builders import entry\n"
        "def said(name):\n"
        "    try: build_model(entry('hf', name))\n"
        "    except ModelsFileError as error: return str(error)\n"
        "print(json.dumps({name: said(name + '/model') for name in sys.argv[1:]}))"
    )
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"
    done = subprocess.run(
        [sys.executable, "-c", code, "gated", "unknown", "pickled"],
        env=os.environ | {"HF_ENDPOINT": address, "HF_HUB_OFFLINE": "0", "NO_PROXY": "127.0.0.1"},
        stdout=subprocess.PIPE,
        check=True,
        timeout=500,
    )
    server.shutdown()
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    ("owner", "says"),
    [
        ("gated", "ask for access at https://huggingface.co/gated/model, then set HF_TOKEN"),
        ("unknown", "no model 'unknown/model' that this box may see; check the name"),
        ("pickled", "where it has pickled weights only, load it where you trust it"),
    ],
)
def test_what_the_hub_refuses_is_said(hub_answers: dict[str, str], owner: str, says: str) -> None:
    assert says in hub_answers[owner]
