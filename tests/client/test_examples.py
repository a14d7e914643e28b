"""The examples run, and end where the same work without a box ends."""

from __future__ import annotations

import importlib.util
import os
import runpy
import shutil
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import ModuleType

import pytest
import torch
from safetensors.torch import load_file

from tests.boxes import ROOT, TestBox, running_box
from tests.pages import program

# Two sides in float32, thirty optimizer steps apart.
TOLERANCE = 1e-5

# What changes in a step: six matrices in one blob, the small tensors in one, and the cotangents.
SENT_A_STEP = 3


def test_the_page_on_remote_autograd_runs_as_it_stands(
    real: TestBox, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    (tmp_path / "block.py").write_text(program("docs/remote_autograd.md"))
    monkeypatch.setenv("GRADBOX_URL", real.url)
    monkeypatch.setenv("GRADBOX_TOKEN", real.token)
    runpy.run_path(str(tmp_path / "block.py"))
    loss, num_grads = capsys.readouterr().out.split()
    assert float(loss) > 0
    assert int(num_grads) > 90


def test_the_page_on_notebooks_runs_as_it_stands(
    real: TestBox, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    (tmp_path / "blocks.py").write_text(program("docs/notebooks.md"))
    monkeypatch.setenv("GRADBOX_URL", real.url)
    monkeypatch.setenv("GRADBOX_TOKEN", real.token)
    runpy.run_path(str(tmp_path / "blocks.py"))
    first, both, *losses = capsys.readouterr().out.splitlines()
    assert first.endswith(" over 3 shards")
    loss = float(first.split()[0])
    expected = pytest.approx([loss, 2 * loss], rel=1e-5)
    assert [float(value) for value in both.strip("[]").split(",")] == expected
    assert [float(value) for value in losses] == pytest.approx([loss, 2 * loss, 4 * loss], rel=1e-5)


def example(name: str) -> ModuleType:
    path = Path(ROOT, "examples", f"{name}.py")
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    "num_steps", [3, pytest.param(30, marks=pytest.mark.slow)], ids=["short", "whole"]
)
def test_training_the_last_block_is_as_without_a_box(
    real: TestBox, uploads: list[str], num_steps: int
) -> None:
    training = example("train_last_block")
    counts: list[int] = []
    with real.client() as client:
        remote = training.train_remotely(
            client, num_steps=num_steps, after_step=lambda: counts.append(len(uploads))
        )
    local = training.train_locally(num_steps=num_steps)
    assert abs(remote[-1] - local[-1]) <= TOLERANCE
    assert remote[-1] < remote[0]
    steps = [after - before for before, after in pairwise(counts)]
    # None where a run before this one on the same box came through the same numbers.
    assert set(steps) <= {0, SENT_A_STEP}
    assert steps[-1] == SENT_A_STEP


DRAWN = [
    "barlow_twins",
    "dp_sgd",
    "influence",
    "ntk_gram",
    "supervised_contrastive",
    "trak",
    "two_towers",
    "wgan_gp",
]
MOST_PICTURE_BYTES = 60_000


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestBox]:
    """A box with what `examples/models.toml` registers."""
    pytest.importorskip("sklearn")
    pytest.importorskip("matplotlib")
    with running_box(
        tmp_path_factory.mktemp("examples"), models=Path(ROOT, "examples", "models.toml")
    ) as box:
        yield box


@pytest.mark.slow
@pytest.mark.parametrize("name", ["assignment", *DRAWN])
def test_an_example_agrees_with_local_autograd(
    served: TestBox,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
    tmp_path: Path,
    name: str,
) -> None:
    path, picture = Path(ROOT, "examples", f"{name}.py"), tmp_path / f"{name}.png"
    monkeypatch.setenv("GRADBOX_URL", served.url)
    monkeypatch.setenv("GRADBOX_TOKEN", served.token)
    monkeypatch.syspath_prepend(path.parent)
    drawing = ["--picture", str(picture)] if name in DRAWN else []
    monkeypatch.setattr(sys, "argv", [str(path), *drawing])
    runpy.run_path(str(path), run_name="__main__")
    assert "from local autograd" in capsys.readouterr().out
    assert not drawing or 0 < picture.stat().st_size < MOST_PICTURE_BYTES


def test_an_example_is_read_on_one_screen_and_shown_on_the_page() -> None:
    page = Path(ROOT, "docs", "examples.md").read_text()
    for name in ["assignment", *DRAWN]:
        path = Path(ROOT, "examples", f"{name}.py")
        assert len(path.read_text().splitlines()) <= 80, name
        assert f"../examples/{name}.py" in page
    for name in DRAWN:
        assert f"(pictures/{name}.png)" in page
        assert Path(ROOT, "docs", "pictures", f"{name}.png").stat().st_size < MOST_PICTURE_BYTES


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("curl") is None, reason="expected curl on the PATH")
def test_curl_alone_gets_the_gradient_of_local_autograd(
    served: TestBox, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    found = tmp_path / "gradient.safetensors"
    done = subprocess.run(
        [Path(ROOT, "examples", "curl.sh"), found],
        env={**os.environ, "GRADBOX_URL": served.url, "GRADBOX_TOKEN": served.token},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    monkeypatch.syspath_prepend(Path(ROOT, "examples"))
    model = example("digits").classifier()
    x = torch.stack([torch.zeros(64), torch.ones(64)]).double()
    torch.nn.functional.cross_entropy(model(x), torch.tensor([3, 7])).backward()
    grads = load_file(found)
    assert set(grads) >= {"grads/2.bias", "grads/2.weight"}
    for name in ("bias", "weight"):
        expected = getattr(model[2], name).grad
        assert torch.allclose(grads[f"grads/2.{name}"], expected, atol=1e-6)
