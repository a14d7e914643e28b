"""What is built and installed elsewhere: a wheel in an environment of its own, with its box."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from gradbox.cli import main
from tests.boxes import ROOT

EXAMPLES = ROOT / "examples"


def run(*command: object, cwd: Path) -> str:
    """Run a command outside the repository, and return what it printed."""
    words = [str(word) for word in command]
    apart = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    ran = subprocess.run(words, cwd=cwd, env=apart, stdout=subprocess.PIPE, text=True, check=True)
    return ran.stdout


def test_the_version_is_that_of_the_distribution(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith(f"gradbox {metadata.version('gradbox')}, protocol ")


@pytest.mark.slow  # it installs torch once more
@pytest.mark.timeout(1800)
def test_an_installed_wheel_runs_the_first_example_on_a_box_of_its_own(tmp_path: Path) -> None:
    # The wheel is built from the sdist, so that nothing is missing in either.
    run(sys.executable, "-m", "build", "--outdir", tmp_path, ROOT, cwd=tmp_path)
    (wheel,) = tmp_path.glob("*.whl")
    assert list(tmp_path.glob("*.tar.gz"))
    run(sys.executable, "-m", "venv", tmp_path / "env", cwd=tmp_path)
    commands = tmp_path / "env" / "bin"
    install = (commands / "python", "-m", "pip", "install", "--quiet")
    run(*install, "-c", ROOT / "constraints.txt", f"{wheel}[demo]", cwd=tmp_path)
    version = run(commands / "gradbox", "--version", cwd=tmp_path)
    assert version.startswith(f"gradbox {metadata.version('gradbox')}, ")
    up = (commands / "gradbox", "up", "--port", "0", "--data", tmp_path / "data")
    first = f"{commands / 'python'} {EXAMPLES / 'first.py'}"
    said = run(*up, "--models", EXAMPLES / "models.toml", "--exec", first, cwd=tmp_path)
    assert "largest difference" in said
