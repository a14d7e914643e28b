"""`gradbox models list` and `gradbox models verify`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gradbox.cli.exits import run_alone
from gradbox_worker.models.command import register
from tests.worker import zoo


def run(*arguments: str) -> int:
    return run_alone(register, ["models", *arguments])


def models_file(folder: Path, *functions: str) -> str:
    path = folder / "models.toml"
    path.write_text(
        "".join(
            f'[models.{function}]\nbuilder = "python"\nsource = "{zoo.__file__}:{function}"\n'
            for function in functions
        )
    )
    return str(path)


def test_list_names_the_entries_without_building_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("list", "--json", "--models", models_file(tmp_path, "raises", "affine")) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(row["name"], row["builder"]) for row in rows] == [
        ("raises", "python"),
        ("affine", "python"),
    ]


def test_verify_states_version_size_and_arguments(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("verify", "--json", "--models", models_file(tmp_path, "affine")) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert len(row["version"]) == 64
    assert (row["num_parameters"], row["methods"], row["problem"]) == (8, {"forward": ["x"]}, None)


def test_verify_goes_on_after_a_model_that_cannot_be_served(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    functions = ("raises", "different_each_time", "not_a_module", "affine")
    assert run("verify", "--models", models_file(tmp_path, *functions)) == 1
    lines = capsys.readouterr().out.splitlines()
    assert "raises: NOT USABLE: the model 'raises' failed with KeyError" in lines[0]
    assert "expected the same model each time" in lines[1]
    assert "got object" in lines[2]
    assert lines[3].startswith("affine: version ")


def test_a_file_that_cannot_be_read_is_wrong_usage(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("verify", "--models", str(tmp_path / "none.toml")) == 2
    assert "gradbox models: " in capsys.readouterr().err
