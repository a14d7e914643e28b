"""`gradbox models list`, `add` and `verify` on a models file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import save_model
from torch import nn

from gradbox.cli.exits import run_alone
from gradbox_worker.models import read_models_file
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
    assert row["size_bytes"] == 4 * 8


def test_verify_goes_on_after_a_model_that_cannot_be_served(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    functions = ("raises", "different_each_time", "not_a_module", "affine")
    assert run("verify", "--models", models_file(tmp_path, *functions)) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("raises: NOT USABLE: models.raises: python ")
    assert "raised KeyError: 'no such checkpoint' (line " in lines[0]
    assert "expected the same model each time" in lines[1]
    assert "got object" in lines[2]
    assert lines[3] == "affine: usable"


def test_a_file_that_cannot_be_read_is_wrong_usage(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("verify", "--models", str(tmp_path / "none.toml")) == 2
    assert "gradbox: models: " in capsys.readouterr().err


def add(folder: Path, name: str, *options: str) -> int:
    return run("add", name, "--models", str(folder / "models.toml"), *options)


def test_add_writes_a_block_that_verify_finds_unchanged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert add(tmp_path, "m", "--from", f"{zoo.__file__}:affine", "--kwarg", "dropout=0.25") == 0
    said = capsys.readouterr().out
    assert "  parameters  8 in 2 tensors\n" in said
    assert "  call        forward(x)\n" in said
    (entry,) = read_models_file(tmp_path / "models.toml").values()
    assert (entry.builder, entry.kwargs) == ("python", {"dropout": 0.25})
    assert entry.registered is not None
    assert run("verify", "--models", str(tmp_path / "models.toml")) == 0


def test_add_keeps_comments_and_the_other_blocks(tmp_path: Path) -> None:
    before = '# ours\n[models.a]\nbuilder = "python"   # by hand\nsource  = "x:f"\n'
    (tmp_path / "models.toml").write_text(before)
    (tmp_path / "f.py").write_text("from torch import nn\ndef f():\n    return nn.Linear(2, 2)\n")
    assert add(tmp_path, "b", "--from", str(tmp_path / "f.py:f")) == 0
    text = (tmp_path / "models.toml").read_text()
    assert text.startswith(before)
    assert 'source = "./f.py:f"' in text


@pytest.mark.parametrize(
    ("options", "code", "says"),
    [
        (["--from", f"{zoo.__file__}:raises"], 1, "NOT USABLE: models.m: python"),
        (["--from", f"{zoo.__file__}:not_a_module"], 1, "to return a torch.nn.Module"),
        (["--from", zoo.__file__], 1, f"write {zoo.__file__}:FUNCTION, with builder"),
        (["--from", "no/such"], 1, "hf download no/such"),
        (["--from", f"{zoo.__file__}:affine", "--weights", "w.bin"], 2, 'torch.load("w.bin"'),
        (["--from", "x", "--builder", "tf"], 2, "expected one of hf, torchvision, timm, python"),
        (["--from", "x", "--kwarg", "depth"], 2, "expected KEY=VALUE, got 'depth'"),
    ],
)
def test_a_model_that_cannot_be_served_is_not_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], code: int, says: str
) -> None:
    assert add(tmp_path, "m", *options) == code
    said = capsys.readouterr()
    assert says in said.out + said.err
    assert not (tmp_path / "models.toml").exists()


def test_a_name_that_is_taken_is_replaced_only_on_request(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert add(tmp_path, "m", "--from", f"{zoo.__file__}:affine") == 0
    assert add(tmp_path, "m", "--from", f"{zoo.__file__}:tied") == 2
    assert "or --replace it" in capsys.readouterr().err
    assert add(tmp_path, "m", "--from", f"{zoo.__file__}:tied", "--replace") == 0
    (entry,) = read_models_file(tmp_path / "models.toml").values()
    assert entry.source.endswith(":tied")


def test_verify_tells_other_weights_from_other_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, path = "from torch import nn\ndef f():\n    return nn.Linear(2, 2)\n", tmp_path / "f.py"
    path.write_text(code)
    save_model(nn.Linear(2, 2), str(tmp_path / "w.safetensors"))
    weights = ["--weights", str(tmp_path / "w.safetensors")]
    assert add(tmp_path, "m", "--from", f"{path}:f", *weights) == 0
    verify = ["verify", "--models", str(tmp_path / "models.toml")]
    path.write_text(code + "# another line\n")
    assert run(*verify) == 1
    assert "CHANGED: registered as version" in (said := capsys.readouterr().out)
    assert "its weights are the same; its code" in said
    save_model(nn.Linear(2, 2), str(tmp_path / "w.safetensors"))
    assert run(*verify) == 1
    assert "its weights are others" in capsys.readouterr().out
    assert run(*verify, "--accept") == 0
    assert run(*verify) == 0


def test_what_a_builder_prints_does_not_mix_with_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "f.py").write_text(
        "from torch import nn\ndef f():\n    print('hello')\n    return nn.Linear(2, 2)\n"
    )
    assert add(tmp_path, "m", "--from", str(tmp_path / "f.py:f"), "--json") == 0
    said = capsys.readouterr()
    assert json.loads(said.out)["problem"] is None
    assert "hello" in said.err
