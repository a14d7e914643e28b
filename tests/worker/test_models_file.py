"""models.toml is read strictly, and every refusal says where and what to do."""

from __future__ import annotations

from pathlib import Path

import pytest

from gradbox_worker.errors import ModelsFileError
from gradbox_worker.models import read_models_file
from gradbox_worker.models.models_file import gpus_of_a_device
from gradbox_worker.models.register import holds


def write(folder: Path, text: str) -> Path:
    path = folder / "models.toml"
    path.write_text(text)
    return path


def test_an_entry_has_the_documented_defaults(tmp_path: Path) -> None:
    path = write(tmp_path, '[models.m]\nbuilder = "hf"\nsource = "org/name"\n')
    entry = read_models_file(path)["m"]
    assert (entry.builder, entry.source, entry.kwargs) == ("hf", "org/name", {})
    assert (entry.weights, entry.methods, entry.folder) == (None, ("forward",), tmp_path)


def test_weights_are_relative_to_the_models_file(tmp_path: Path) -> None:
    (tmp_path / "w.safetensors").touch()
    text = '[models.m]\nbuilder = "timm"\nsource = "s"\nweights = "w.safetensors"\n'
    assert read_models_file(write(tmp_path, text))["m"].weights == tmp_path / "w.safetensors"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("models = 3", r"at least one \[models.NAME\] table"),
        ("[models", "expected TOML"),
        ("[model.m]\n", "only the keys models, got 'model'"),
        ('[models."../m"]\nbuilder = "hf"\nsource = "s"', "expected a name of letters"),
        ('[models.m]\nsource = "s"', "models.m.builder: expected a non-empty string, got nothing"),
        ('[models.m]\nbuilder = "tf"\nsource = "s"', "expected one of hf, torchvision, timm"),
        ('[models.m]\nbuilder = "hf"', "models.m.source: expected a non-empty string"),
        ('[models.m]\nbuilder = "hf"\nsource = "s"\nwieghts = "w"', "got 'wieghts'"),
        ('[models.m]\nbuilder = "hf"\nsource = "s"\nweights = "w.bin"', r"a \.safetensors file"),
        ('[models.m]\nbuilder = "hf"\nsource = "s"\nmethods = []', "a list of method names"),
        ('[models.m]\nbuilder = "hf"\nsource = "s"\nmethods = ["_f"]', "public method names"),
        ('[models.m]\nbuilder = "hf"\nsource = "s"\nkwargs = 1', "kwargs: expected a table"),
        ('[models.m]\nbuilder = "hf"\nsource = "s"\ngpus_per_device = 0', "a whole number from 1"),
        ('[models.m]\nbuilder = "timm"\nsource = "s"\ngpus_per_device = 2', "with builder hf"),
        (
            '[models.m]\nbuilder = "hf"\nsource = "s"\nkwargs = {device_map = "auto"}',
            "write gpus_per_device = 2",
        ),
    ],
)
def test_what_does_not_belong_is_refused(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(ModelsFileError, match=says):
        read_models_file(write(tmp_path, text))


@pytest.mark.parametrize(
    ("builder", "key"),
    [("hf", "trust_remote_code"), ("timm", "pretrained"), ("torchvision", "weights")],
)
def test_kwargs_that_run_or_unpickle_downloads_are_refused(
    tmp_path: Path, builder: str, key: str
) -> None:
    text = f'[models.m]\nbuilder = "{builder}"\nsource = "s"\nkwargs = {{{key} = true}}\n'
    with pytest.raises(ModelsFileError, match=f"{key}.*never allowed"):
        read_models_file(write(tmp_path, text))


def test_a_missing_file_says_which_option_names_one(tmp_path: Path) -> None:
    with pytest.raises(ModelsFileError, match="--models"):
        read_models_file(tmp_path / "none.toml")


ACCENTED = '# Müller\n[models.m]\nbuilder = "hf"\nsource = "org/name"\n'


@pytest.mark.parametrize(("encoding", "byte"), [("latin-1", "0xfc"), ("utf-16", "0xff")])
def test_a_file_that_is_not_utf_8_says_where(tmp_path: Path, encoding: str, byte: str) -> None:
    path = tmp_path / "models.toml"
    path.write_bytes(ACCENTED.encode(encoding))
    says = f"expected TOML, got: in line 1 the byte {byte}, which is not UTF-8; save the file"
    with pytest.raises(ModelsFileError, match=says):
        read_models_file(path)
    with pytest.raises(ModelsFileError, match=says):
        holds(path, "m")


def test_a_byte_order_mark_is_no_error(tmp_path: Path) -> None:
    path = tmp_path / "models.toml"
    path.write_bytes(ACCENTED.encode("utf-8-sig"))
    assert list(read_models_file(path)) == ["m"]
    assert holds(path, "m")


def test_a_device_has_the_gpus_of_the_model_that_wants_most(tmp_path: Path) -> None:
    text = '[models.{}]\nbuilder = "hf"\nsource = "s"\ngpus_per_device = {}\n'
    entries = read_models_file(write(tmp_path, text.format("a", 4) + text.format("b", 2)))
    assert gpus_of_a_device(entries) == 4
    assert [entry.gpus_per_device for entry in entries.values()] == [4, 2]
    assert gpus_of_a_device({}) == 1
