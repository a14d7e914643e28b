"""Models with registered tensors that lie in each other's memory, given other numbers for a job."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from gradbox_engine import BadWeights, Group, Objective, set_gradient
from gradbox_engine.model.shared_memory import blocks
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


@pytest.mark.parametrize("names", [("means",), ("mean",), ("means", "mean")])
def test_weights_for_them_are_refused(names):
    model = _Overlapping()
    given = {name: torch.ones_like(getattr(model, name)).cpu() for name in names}
    with pytest.raises(BadWeights, match=f"'{names[0]}'.*lies in the same memory as"):
        set_gradient(model, [Group("z", _shards())], Objective(_loss), weights=given)
    assert not model.means.any()


def test_neighbours_in_one_storage_are_given_weights_apart():
    flat = torch.zeros(6)
    assert [len(block) for block in blocks([flat[:3], flat[3:]])] == [1, 1]
    assert len(blocks([flat, flat[4:]])) == 1
    assert len(blocks([flat, flat[4:].view(torch.int32)])) == 1
