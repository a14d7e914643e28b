"""`hf` models over the GPUs of one device: what accelerate is asked for, and what is refused.

Where there are no GPUs it has the CPU alone, which shows all but the cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from gradbox.errors import UnusableModel
from gradbox_worker.computations.placement import gpus_of
from gradbox_worker.errors import ModelsFileError
from gradbox_worker.models import read_models_file
from gradbox_worker.models.builders import build_model
from gradbox_worker.models.registry import Registry
from gradbox_worker.models.version import model_version

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def models_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("spread")
    from transformers import BertConfig, BertModel

    config = BertConfig(
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        vocab_size=50,
    )
    torch.manual_seed(0)
    BertModel(config).save_pretrained(folder / "tiny")
    file = folder / "models.toml"
    file.write_text(
        '[models.large]\nbuilder = "hf"\nsource = "./tiny"\ngpus_per_device = 2\n'
        '[models.small]\nbuilder = "hf"\nsource = "./tiny"\n'
    )
    return file


def registry(file: Path, gpus: Sequence[torch.device]) -> Registry:
    return Registry(read_models_file(file), device=CPU, gpus=gpus)


@pytest.mark.parametrize("gpus", [(), (torch.device("cuda", 0),)], ids=["a CPU", "one GPU"])
def test_a_device_that_has_fewer_gpus_refuses_the_model_and_serves_the_others(
    models_file: Path, gpus: Sequence[torch.device]
) -> None:
    models = registry(models_file, gpus)
    usable = {view.name: view.usable for view in models.describe()}
    assert usable == {"large": False, "small": True}
    with pytest.raises(UnusableModel, match=f"a device of 2 GPUs, got one of {len(gpus)}"):
        models.get("large")


def test_a_spread_model_has_the_version_that_it_has_on_one_device(models_file: Path) -> None:
    entry = read_models_file(models_file)["large"]
    assert model_version(build_model(entry, over=[CPU])) == model_version(build_model(entry))


def test_a_spread_model_is_alone_on_its_device(models_file: Path) -> None:
    models = registry(models_file, (CPU, CPU))
    models.get("small")
    assert models.get("large").devices == (CPU,)
    assert not models.holds("small")


def test_a_model_that_its_gpus_do_not_hold_is_refused_and_not_read_from_disk(
    models_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Room for some of it: older versions of accelerate refuse what would be on the disk in whole.
    monkeypatch.setattr("gradbox_worker.models.spread._free_bytes", lambda device: 60_000)
    with pytest.raises(ModelsFileError, match="set a larger gpus_per_device"):
        build_model(read_models_file(models_file)["large"], over=[CPU, CPU])


def test_a_cpu_has_no_gpus() -> None:
    assert gpus_of(CPU, num_gpus=4) == ()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="wants two GPUs")
def test_a_model_lies_on_all_of_its_gpus(models_file: Path) -> None:
    gpus = gpus_of(torch.device("cuda", 0), num_gpus=2)
    models = Registry(read_models_file(models_file), device=gpus[0], gpus=gpus)
    assert models.get("large").devices == gpus
