"""A model's files on a machine that does not have them where the models file says."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from gradbox_worker.models import read_models_file
from gradbox_worker.models.builders import build_with_code
from gradbox_worker.models.models_file import ModelEntry
from gradbox_worker.models.shipping import ShippedModels
from gradbox_worker.models.version import model_version

BUILDER = "from torch import nn\n\nclass Net(nn.Linear): ...\n\ndef net():\n    return Net(2, 3)\n"


class Elsewhere:
    """The files of a machine, by their paths there, once they are gone here."""

    def __init__(self, folder: Path) -> None:
        self._data = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        self.fetched: list[str] = []
        shutil.rmtree(folder)

    def fetch(self, path: Path) -> bytes:
        self.fetched.append(path.name)
        return self._data[path]


@pytest.fixture
def models_file(tmp_path: Path) -> Path:
    folder = tmp_path / "there"
    (folder / "code").mkdir(parents=True)
    (folder / "code" / "net.py").write_text(BUILDER)
    weights = {"weight": torch.ones(3, 2), "bias": torch.arange(3.0)}
    save_file(weights, folder / "net.safetensors")
    path = folder / "models.toml"
    path.write_text(
        '[models.net]\nbuilder = "python"\nsource = "code/net.py:net"\n'
        'weights = "net.safetensors"\n'
        '[models.packaged]\nbuilder = "python"\nsource = "tests.case_models:mlp"\n'
    )
    return path


def version(entry: ModelEntry) -> str:
    model, code = build_with_code(entry)
    return model_version(model, code=code)


def nowhere() -> Path:
    """Fail, as nothing wants a folder of its own."""
    return pytest.fail("asked for a folder")


def test_files_that_are_there_are_used_where_they_are(models_file: Path, tmp_path: Path) -> None:
    entries = read_models_file(models_file)
    shipped = ShippedModels.of(entries)
    assert shipped.here(nowhere, lambda path: pytest.fail(f"fetched {path}")) == entries


def test_a_model_whose_files_are_fetched_is_the_same_version(
    models_file: Path, tmp_path: Path
) -> None:
    entries = read_models_file(models_file)
    shipped, expected = ShippedModels.of(entries), version(entries["net"])
    elsewhere = Elsewhere(models_file.parent)
    found = shipped.here(lambda: tmp_path / "here", elsewhere.fetch)
    assert sorted(elsewhere.fetched) == ["net.py", "net.safetensors"]
    assert version(found["net"]) == expected
    assert found["packaged"] == entries["packaged"]


def test_what_was_fetched_before_is_used_again_unless_it_has_changed(
    models_file: Path, tmp_path: Path
) -> None:
    shipped = ShippedModels.of(read_models_file(models_file))
    elsewhere = Elsewhere(models_file.parent)
    shipped.here(lambda: tmp_path / "here", elsewhere.fetch)
    elsewhere.fetched.clear()
    shipped.here(lambda: tmp_path / "here", elsewhere.fetch)
    assert elsewhere.fetched == []
    (tmp_path / "here" / "net" / "net.py").write_text("changed")
    shipped.here(lambda: tmp_path / "here", elsewhere.fetch)
    assert elsewhere.fetched == ["net.py"]


def test_a_folder_of_transformers_comes_with_all_its_files(tmp_path: Path) -> None:
    folder = tmp_path / "there" / "bert"
    (folder / "deep").mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "bert"}))
    (folder / "deep" / "vocab.txt").write_text("a\nb\n")
    path = tmp_path / "there" / "models.toml"
    path.write_text('[models.bert]\nbuilder = "hf"\nsource = "bert"\n')
    shipped = ShippedModels.of(read_models_file(path))
    elsewhere = Elsewhere(path.parent)
    entry = shipped.here(lambda: tmp_path / "here", elsewhere.fetch)["bert"]
    assert (entry.folder / entry.source / "deep" / "vocab.txt").read_text() == "a\nb\n"
    assert (entry.folder / entry.source / "config.json").is_file()


def test_a_name_of_the_hub_is_left_to_the_machine(tmp_path: Path) -> None:
    path = tmp_path / "models.toml"
    path.write_text('[models.bert]\nbuilder = "hf"\nsource = "somebody/bert"\n')
    shipped = ShippedModels.of(read_models_file(path))
    assert shipped.digests == {}
    found = shipped.here(nowhere, lambda path: pytest.fail(f"fetched {path}"))
    assert found["bert"].source == "somebody/bert"
