"""The examples run, and end where the same work without a box ends."""

from __future__ import annotations

import importlib.util
import re
import runpy
from itertools import pairwise
from pathlib import Path
from types import ModuleType

import pytest

from tests.boxes import ROOT, TestBox

# Two sides in float32, thirty optimizer steps apart.
TOLERANCE = 1e-5

# What changes in a step: six matrices, each a blob of its own, the small tensors in one, and the
# cotangents in one.
PUTS_A_STEP = 8


def test_the_page_on_remote_autograd_runs_as_it_stands(
    real: TestBox, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    page = Path(ROOT, "docs", "remote_autograd.md").read_text()
    found = re.search(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    assert found is not None
    (tmp_path / "block.py").write_text(found.group(1))
    monkeypatch.setenv("GRADBOX_URL", real.url)
    monkeypatch.setenv("GRADBOX_TOKEN", real.token)
    runpy.run_path(str(tmp_path / "block.py"))
    loss, num_grads = capsys.readouterr().out.split()
    assert float(loss) > 0
    assert int(num_grads) > 90


def test_the_page_on_notebooks_runs_as_it_stands(
    real: TestBox, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    page = Path(ROOT, "docs", "notebooks.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    (tmp_path / "blocks.py").write_text("\n".join(blocks))
    monkeypatch.setenv("GRADBOX_URL", real.url)
    monkeypatch.setenv("GRADBOX_TOKEN", real.token)
    runpy.run_path(str(tmp_path / "blocks.py"))
    first, both, *losses = capsys.readouterr().out.splitlines()
    assert "done=3 total=3" in first
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
    "num_steps", [4, pytest.param(30, marks=pytest.mark.slow)], ids=["short", "whole"]
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
    assert set(steps) <= {0, PUTS_A_STEP}
    assert steps[-1] == PUTS_A_STEP
