"""The notebooks of examples/: each runs from its first cell to its last, and is small as it is."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

from tests.boxes import ROOT
from tests.client.test_examples import example

NOTEBOOKS = sorted((ROOT / "examples" / "notebooks").glob("*.ipynb"))
MOST_BYTES = 200_000


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GRADBOX_URL", "GRADBOX_TOKEN", "GRADBOX_DATA"):
        monkeypatch.delenv(name, raising=False)
    folder = tmp_path / "examples" / "notebooks"
    shutil.copytree(ROOT / "examples", folder.parent)
    try:
        run = example("notebooks/run").run(folder / path.name)
    finally:  # where it broke off, its box goes on
        down = [sys.executable, "-m", "gradbox", "down", "--data", str(folder / "gradbox-data")]
        subprocess.run(down, check=False)
    assert [cell for cell in run.cells if "image/png" in str(cell.get("outputs"))]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_small_and_shows_pictures(path: Path) -> None:
    assert path.stat().st_size <= MOST_BYTES
    text = path.read_text()
    assert "image/png" in text
    assert str(ROOT) not in text
    cells = nbformat.read(path, as_version=4).cells
    outputs = [output for cell in cells for output in cell.get("outputs", ())]
    assert {"error"}.isdisjoint(output.output_type for output in outputs)
