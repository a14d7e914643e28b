"""Models whose forward pass is itself a derivative: forces from an energy."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from gradbox_engine import Group, Objective, set_gradient
from tests.engine.replay.odd_models import ByAutograd, ByFunc
from tests.oracle import TOLERANCE, difference


def _shards() -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [{"0": torch.randn(3, 5, generator=generator, dtype=torch.float64)} for _ in range(4)]


def _loss(z: Tensor) -> Tensor:
    return (z @ z.T).exp().mean()


@pytest.mark.parametrize("retain", [0, 10**9])
@pytest.mark.parametrize("kind", [ByAutograd, ByFunc])
def test_graphs_under_a_transform_cannot_be_measured_so_all_but_the_last_one_go(kind, retain):
    calls, called = [], kind()
    called.register_forward_pre_hook(lambda *_: calls.append(1))
    group = Group("z", _shards())
    result = set_gradient(called, [group], Objective(_loss), mode="train", retain=retain)
    kept_all = retain > 0 and kind is ByAutograd
    assert (result.retained, result.replayed) == ((4, 0) if kept_all else (1, 3))
    tried_in_vain = retain > 0 and not kept_all  # once, by the first shard
    assert len(calls) == 4 + result.replayed + tried_in_vain


class _Backward(nn.Module):
    """Calls `backward` in its forward pass, which leaves gradients at parameters and inputs."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.energy = nn.Linear(5, 3).double()

    def forward(self, x: Tensor) -> Tensor:
        h = self.energy(x)
        h.square().sum().backward(retain_graph=True)
        return h.tanh()


@pytest.mark.parametrize("retain", [0, 10**9])
def test_gradients_that_the_forward_pass_left_do_not_count(retain):
    group = Group("z", _shards())
    found = set_gradient(
        _Backward(), [group], Objective(_loss), wrt=["*", "inputs.0"], retain=retain
    )
    plain, xs = _Backward().energy, [shard["0"].requires_grad_() for shard in _shards()]
    _loss(torch.cat([plain(x).tanh() for x in xs])).backward()
    expected = {f"energy.{name}": p.grad for name, p in plain.named_parameters()}
    assert difference(found.grads, expected) <= TOLERANCE
    inputs = dict(enumerate(found.input_grads["z"]["0"]))
    assert difference(inputs, {i: x.grad for i, x in enumerate(xs)}) <= TOLERANCE
