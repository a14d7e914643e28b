"""Models with registered tensors that lie in each other's memory, given other numbers for a job."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from gradbox_engine import BadWeights, Group, Objective, set_gradient
from gradbox_engine.model.shared_memory import blocks, share_entries
from tests.device import DEVICE
from tests.oracle import TOLERANCE, difference


class _Overlapping(nn.Module):
    """Overwrites a buffer in place and reads its second row, which is a buffer as well."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(3, 3, device=DEVICE)
        self.register_buffer("means", torch.zeros(2, 3, device=DEVICE))
        self.register_buffer("mean", self.means[1])

    def forward(self, x: Tensor) -> Tensor:
        z = self.linear(x) + self.mean
        with torch.no_grad():
            self.means.mul_(0.5).add_(z.mean(0))
        return z

    def widened(self) -> nn.Module:
        means = self.means.double()
        self.double()
        self.means, self.mean = means, means[1]
        return self


def _shards() -> list[dict[str, Tensor]]:
    numbers = torch.Generator().manual_seed(1)
    return [{"x": torch.randn(2, 3, generator=numbers)} for _ in range(3)]


def _loss(z: Tensor) -> Tensor:
    return z.square().sum()


def _expected(model: nn.Module, dtype: torch.dtype) -> dict[str, Tensor]:
    _loss(torch.cat([model(shard["x"].to(DEVICE, dtype)) for shard in _shards()])).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def test_they_share_memory_in_float64_too():
    found = set_gradient(
        _Overlapping(), [Group("z", _shards())], Objective(_loss), mode="train", precision="fp64"
    )
    expected = _expected(_Overlapping().widened(), torch.float64)
    assert difference(found.grads, expected) <= TOLERANCE


def test_weights_for_both_share_memory_too():
    weights = {"means": torch.ones(2, 3), "mean": torch.ones(3)}
    model, loaded = _Overlapping(), _Overlapping()
    loaded.load_state_dict(weights, strict=False)
    found = set_gradient(
        model, [Group("z", _shards())], Objective(_loss), mode="train", weights=weights
    )
    assert difference(found.grads, _expected(loaded, torch.float32)) <= 1e-6
    assert not model.means.any()
    assert model.mean.data_ptr() == model.means[1].data_ptr()


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({"means": torch.ones(2, 3)}, "expected numbers for 'mean' as well"),
        ({"mean": torch.ones(3)}, "expected numbers for 'means' as well"),
        ({"means": torch.ones(2, 3), "mean": torch.zeros(3)}, "to agree where these lie"),
    ],
)
def test_weights_that_leave_one_out_or_disagree_are_refused(weights, message):
    model = _Overlapping()
    with pytest.raises(BadWeights, match=message):
        set_gradient(model, [Group("z", _shards())], Objective(_loss), weights=weights)
    assert not model.means.any()


def test_neighbours_in_one_storage_are_given_weights_apart():
    flat = torch.zeros(6)
    assert [len(block) for block in blocks([flat[:3], flat[3:]])] == [1, 1]
    columns = flat.view(3, 2)
    (block,) = blocks([columns[:, 0], columns[:, 1]])
    assert not share_entries(*block)
    (block,) = blocks([flat, flat[4:]])
    assert share_entries(*block)


class _Columns(nn.Module):
    """Has parameters that are columns of one matrix: their ranges of memory meet."""

    def __init__(self) -> None:
        super().__init__()
        numbers = torch.Generator().manual_seed(0)
        matrix = torch.randn(3, 4, generator=numbers).to(DEVICE)
        self.left, self.right = nn.Parameter(matrix[:, :2]), nn.Parameter(matrix[:, 2:])

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.left).tanh() * (x @ self.right)


def test_weights_for_a_part_of_a_matrix_leave_the_registered_numbers_alone():
    model, loaded, registered = _Columns(), _Columns(), _Columns()
    weights = {"left": torch.ones(3, 2)}
    loaded.load_state_dict(weights, strict=False)
    found = set_gradient(model, [Group("z", _shards())], Objective(_loss), weights=weights)
    assert difference(found.grads, _expected(loaded, torch.float32)) <= 1e-6
    for parameter, before in zip(model.parameters(), registered.parameters(), strict=True):
        assert torch.equal(parameter, before)
