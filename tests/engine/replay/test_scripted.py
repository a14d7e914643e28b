"""TorchScript models, which keep their state in C++."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gradbox_engine import Group, Objective, set_gradient
from tests.device import DEVICE
from tests.oracle import TOLERANCE, difference


class _Scripted(nn.Module):
    """Scales its gradient by the number of its calls, and binds a buffer and a list anew."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(5, 3)
        self.calls = 0
        self.sizes = [1]
        self.register_buffer("mean", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.sizes.append(x.shape[0])
        z = self.linear(x) - self.mean
        self.mean = 0.9 * self.mean + 0.1 * z.detach().mean(0)
        return z.tanh() + (self.calls - 1) * (z - z.detach())


def _model() -> Any:
    return torch.jit.script(_Scripted().to(DEVICE, torch.float64))


def _shards() -> list[dict[str, Tensor]]:
    numbers = torch.Generator().manual_seed(1)
    return [{"0": torch.randn(n, 5, dtype=torch.float64, generator=numbers)} for n in (3, 2, 1)]


def _loss(z: Tensor) -> Tensor:
    return z.sum(0).square().sum()


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("retain", [0, 10**9])
def test_a_scripted_model_has_state_shard_by_shard_and_is_left_as_it_was(wrapped, retain):
    naive, scripted = _model(), _model()
    _loss(torch.cat([naive(x["0"].to(DEVICE)) for x in _shards()])).backward()
    model = nn.Sequential(scripted) if wrapped else scripted
    prefix = "0." if wrapped else ""
    expected = {prefix + name: p.grad for name, p in naive.named_parameters()}
    for _ in range(2):
        groups = [Group("z", _shards())]
        found = set_gradient(model, groups, Objective(_loss), mode="train", retain=retain)
        assert difference(found.grads, expected) <= TOLERANCE
        assert (scripted.calls, scripted.sizes, scripted.mean.any().item()) == (0, [1], False)
