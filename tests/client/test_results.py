"""What a result gives, and how its gradients get into a model."""

from __future__ import annotations

import copy
import gc
import os
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from gradbox import GradResult, InvalidInputs, InvalidJob, ProtocolError
from gradbox.protocol import Receipt, Seconds
from gradbox.results.result_files import HeldFile

RECEIPT = Receipt(
    protocol=1,
    job="j1",
    spec_digest="0" * 64,
    computation="gradient",
    model="m",
    model_version="1" * 64,
    seed=0,
    mode="eval",
    precision="fp32",
    device="cpu",
    torch="2",
    gradbox="0",
    loss=1.5,
    shards={"z": 2},
    shards_retained=0,
    shards_replayed=2,
    replay_difference=0.0,
    seconds=Seconds(),
    peak_memory_bytes=1,
    memory_before_bytes=1,
)

Make = Callable[..., GradResult]


@pytest.fixture(params=["a file", "held"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Make:
    """Make a result as it is read from a file, and as it is held that came with its job."""

    def result(
        grads: dict[str, Tensor],
        *,
        unreached: list[str] | None = None,
        **sections: dict[str, Tensor],
    ) -> GradResult:
        stored = {f"grads/{name}": gradient for name, gradient in grads.items()}
        for section, tensors in sections.items():
            stored |= {f"{section}/{name}": tensor for name, tensor in tensors.items()}
        stated = {"names": tuple(grads), "unreached": unreached or []}
        receipt = RECEIPT.model_copy(update=stated)
        path = tmp_path / "result.safetensors"
        save_file(stored, path, metadata={"format": "pt", "gradbox": receipt.model_dump_json()})
        if request.param == "held":
            return GradResult(HeldFile(path.read_bytes()))
        return GradResult.load(path)

    return result


def linear_grads(model: nn.Linear, value: float = 1.0) -> dict[str, Tensor]:
    return {
        "weight": torch.full(tuple(model.weight.shape), value),
        "bias": torch.full(tuple(model.bias.shape), value),
    }


def test_gradients_come_in_the_receipts_order_as_a_mapping(make: Make) -> None:
    grads = {"z.weight": torch.ones(2, 3), "a.bias": torch.arange(2.0), "loss.t": torch.ones(())}
    result = make(grads, buffers={"mean": torch.zeros(3)})
    assert result.names == tuple(result.grads) == ("z.weight", "a.bias", "loss.t")
    assert torch.equal(result.grads["a.bias"], torch.arange(2.0))
    assert torch.equal(result.flat(), torch.tensor([1.0] * 6 + [0.0, 1.0] + [1.0]))
    assert list(result.buffers) == ["mean"]
    assert result.loss == 1.5
    assert isinstance(result.numpy()["a.bias"], np.ndarray)
    with pytest.raises(KeyError, match=r"'mean' is none of its 3 names, which begin 'z\.weight'"):
        result.grads["mean"]
    with pytest.raises(
        KeyError, match=r"outputs: this result holds none.* where returns has 'outputs'"
    ):
        result.outputs["z"]


def test_gradients_of_inputs_come_in_the_order_of_the_shards(make: Make) -> None:
    shards = {f"{group}/{i}/0": torch.tensor([float(i)]) for group in "ab" for i in range(12)}
    found = make({}, input_grads=shards).input_grads
    assert torch.equal(torch.cat([*found.values()]), torch.arange(12.0).repeat(2))


def test_a_result_without_gradients_is_not_applied_in_silence(make: Make) -> None:
    model = nn.Linear(3, 2)
    result = make({}, outputs={"z": torch.ones(4, 2)})
    with pytest.raises(InvalidJob, match="expected a result that holds gradients"):
        result.apply_to(model)
    with pytest.raises(InvalidJob, match="expected a result that holds gradients"):
        result.flat()
    result.apply_to(model, strict=False)
    assert model.weight.grad is None
    with pytest.raises(KeyError, match=r"grads: this result holds none.*\.outputs, .*\.norms\(\)"):
        result.grads["weight"]


def test_applying_adds_to_what_is_there_and_shares_no_memory(make: Make) -> None:
    model = nn.Linear(3, 2)
    result = make(linear_grads(model))
    result.apply_to(model)
    result.apply_to(model)
    assert model.weight.grad is not None
    assert torch.equal(model.weight.grad, torch.full((2, 3), 2.0))
    assert torch.equal(result.grads["weight"], torch.ones(2, 3))


def test_gradients_take_the_dtype_of_their_parameter(make: Make) -> None:
    model = nn.Linear(3, 2).bfloat16()
    make(linear_grads(model, 1 / 3)).apply_to(model)
    assert model.weight.grad is not None
    assert model.weight.grad.dtype == torch.bfloat16


def test_frozen_parameters_stay_without_gradient(make: Make) -> None:
    model = nn.Linear(3, 2)
    model.bias.requires_grad_(False)
    make(linear_grads(model)).apply_to(model)
    assert model.bias.grad is None


def test_what_the_loss_does_not_reach_stays_without_gradient(make: Make) -> None:
    model, loss = nn.Linear(3, 2), nn.Linear(1, 1)
    grads = {"weight": torch.ones(2, 3), "bias": torch.zeros(2), "loss.weight": torch.zeros(1, 1)}
    result = make(grads, unreached=["bias", "loss.weight"])
    result.apply_to(model)
    result.apply_to(loss, prefix="loss.")
    assert model.weight.grad is not None
    assert model.bias.grad is None
    assert loss.weight.grad is None


def test_a_tied_parameter_is_found_under_any_of_its_names(make: Make) -> None:
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    model[1].weight = model[0].weight
    make({"1.weight": torch.ones(3, 3)}).apply_to(model)
    assert torch.equal(model[0].weight.grad, torch.ones(3, 3))


@pytest.mark.parametrize(
    ("grads", "said"),
    [
        ({"weight": torch.ones(2, 3), "wieght": torch.ones(2)}, "wieght"),
        ({"bias": torch.ones(2), "weight": torch.ones(3, 2)}, r"weight: \(3, 2\).*\(2, 3\)"),
    ],
    ids=["unknown", "shape"],
)
def test_a_result_that_does_not_fit_changes_nothing(
    make: Make, grads: dict[str, Tensor], said: str
) -> None:
    model = nn.Linear(3, 2)
    with pytest.raises(InvalidInputs, match=said):
        make(grads).apply_to(model)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_gradients_of_others_are_passed_over_where_asked(make: Make) -> None:
    model = nn.Linear(3, 2)
    grads = {**linear_grads(model), "head.weight": torch.ones(1), "loss.scale": torch.ones(())}
    make(grads).apply_to(model, strict=False)
    assert model.bias.grad is not None


def test_the_losss_own_gradients_go_to_its_module(make: Make) -> None:
    model, loss = nn.Linear(3, 2), nn.Linear(1, 1)
    grads = {
        **linear_grads(model),
        "loss.weight": torch.full((1, 1), 4.0),
        "loss.bias": torch.ones(1),
    }
    result = make(grads)
    result.apply_to(model)
    result.apply_to(loss, prefix="loss.")
    assert loss.weight.grad is not None
    assert loss.weight.grad.item() == 4.0


def test_saving_writes_the_same_file_and_loading_reads_it(make: Make, tmp_path: Path) -> None:
    result = make({"a": torch.ones(2)})
    result.save(tmp_path / "kept.safetensors")
    kept = (tmp_path / "kept.safetensors").read_bytes()
    assert kept == (tmp_path / "result.safetensors").read_bytes()
    assert GradResult.load(tmp_path / "kept.safetensors").manifest == result.manifest


def test_saving_keeps_what_the_box_computed(make: Make, tmp_path: Path) -> None:
    result = make({"a": torch.ones(2)})
    result.grads["a"].mul_(0)  # as an optimizer may, to which it was handed as `.grad`
    result.save(tmp_path / "kept.safetensors")
    assert torch.equal(GradResult.load(tmp_path / "kept.safetensors").grads["a"], torch.ones(2))


def test_a_fetched_file_is_removed_with_its_result(make: Make, tmp_path: Path) -> None:
    make({"a": torch.arange(3.0)})
    folder = tmp_path / "fetched"
    folder.mkdir()
    (tmp_path / "result.safetensors").rename(folder / "result.safetensors")
    result = GradResult.owning(folder / "result.safetensors")
    gradient = result.grads["a"]
    del result
    gc.collect()
    assert not folder.exists()
    assert torch.equal(gradient, torch.arange(3.0))


def test_a_fetched_file_stays_for_copies_of_its_result(make: Make, tmp_path: Path) -> None:
    make({"a": torch.arange(3.0)})
    folder = tmp_path / "fetched"
    folder.mkdir()
    (tmp_path / "result.safetensors").rename(folder / "result.safetensors")
    result = GradResult.owning(folder / "result.safetensors")
    shallow, deep = copy.copy(result), copy.deepcopy(result)
    with pytest.raises(InvalidInputs, match=r"result\.save"):
        ForkingPickler.dumps(result)
    del result
    gc.collect()
    for number, left in enumerate((shallow, deep)):
        left.save(tmp_path / f"{number}.safetensors")
        assert torch.equal(left.grads["a"], torch.arange(3.0))
    del shallow, deep, left
    gc.collect()
    assert not folder.exists()


def test_a_forked_process_leaves_the_fetched_file_to_its_parent(make: Make, tmp_path: Path) -> None:
    make({"a": torch.arange(3.0)})
    folder = tmp_path / "fetched"
    folder.mkdir()
    (tmp_path / "result.safetensors").rename(folder / "result.safetensors")
    result = GradResult.owning(folder / "result.safetensors")
    child = os.fork()
    if not child:
        del result
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    result.save(tmp_path / "kept.safetensors")


def test_what_is_no_result_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_file({"a": torch.ones(1)}, path)
    with pytest.raises(ProtocolError, match="result file of gradbox"):
        GradResult.load(path)
    path.write_bytes(b"not safetensors")
    with pytest.raises(ProtocolError, match="result file of gradbox"):
        GradResult.load(path)
    with pytest.raises(FileNotFoundError):
        GradResult.load(tmp_path / "nothing")
