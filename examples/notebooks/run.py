"""Runs notebooks, each with a kernel of its own, and writes their outputs into them.

    pip install '.[demo,plot,adapters]' scikit-learn nbclient ipykernel
    python examples/notebooks/run.py [FILE.ipynb ...]      # by default all of this folder

What progress bars left is taken out, and so are the times at which cells ran.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

TIMEOUT_S = 600
WIDGET = "application/vnd.jupyter.widget-view+json"


def run(path: Path) -> Any:
    """Run a notebook in its folder, with this Python's commands, and return it."""
    commands = str(Path(sys.executable).parent)
    if commands not in os.environ["PATH"].split(os.pathsep):
        os.environ["PATH"] = commands + os.pathsep + os.environ["PATH"]
    notebook = nbformat.read(path, as_version=4)
    where = {"metadata": {"path": str(path.parent)}}
    NotebookClient(notebook, timeout=TIMEOUT_S, resources=where, record_timing=False).execute()
    notebook.metadata.pop("widgets", None)
    for cell in notebook.cells:
        cell["outputs"] = [kept for kept in cell.get("outputs", ()) if _is_kept(kept)]
        if cell.cell_type != "code":
            del cell["outputs"]
    return notebook


def _is_kept(output: Any) -> bool:
    return output.get("name") != "stderr" and WIDGET not in output.get("data", ())


if __name__ == "__main__":
    folder = Path(__file__).parent
    for path in map(Path, sys.argv[1:]) if sys.argv[1:] else sorted(folder.glob("*.ipynb")):
        nbformat.write(run(path.resolve()), path)
        print(path)
