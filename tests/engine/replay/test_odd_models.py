"""What is odd in a model never shows in its gradient, whatever graphs are kept, job after job."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gradbox_engine import Group, Objective, SetGradient, set_gradient, shard_stream
from tests.device import REPLAYED
from tests.engine.replay.odd_models import ODD, Odd
from tests.oracle import TOLERANCE, difference

SEED = 5
Loss = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Naive:
    grads: dict[str, Tensor]
    buffers: dict[str, Tensor]


def naive(odd: Odd, loss: Loss) -> Naive:
    """Carry back shard by shard: a graph of all would read what later shards left."""
    built, shards = odd.plain or odd.model, odd.shards()

    def outputs(model: nn.Module, index: int) -> Tensor:
        with shard_stream(SEED, 0, index):
            z: Tensor = model(shards[index]["0"])
        return z

    model = built().train()
    z = torch.cat([outputs(model, index).detach() for index in range(len(shards))])
    loss(z.requires_grad_()).backward()
    assert z.grad is not None
    model = built().train()
    sums = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for index, cotangent in enumerate(z.grad.split([len(shard["0"]) for shard in shards])):
        found = outputs(model, index)
        model.zero_grad()
        found.backward(cotangent)
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                sums[name] += parameter.grad.to_dense()
    return Naive(sums, dict(model.named_buffers()))


def spread(z: Tensor) -> Tensor:
    return torch.exp(-torch.cdist(z, z).square()).mean()


def of_some(z: Tensor) -> Tensor:
    """Leave some shards in the middle without a cotangent."""
    return (z[:6].sin().sum() * z[-6:].cos().sum()).tanh() + z[9:12].pow(3).mean()


def _leaves(model: nn.Module) -> list[Tensor]:
    return [x for x in vars(model).values() if isinstance(x, Tensor)]


def _dense(x: Tensor) -> Tensor:
    return x.to_dense() if x.layout != torch.strided else x


@pytest.mark.filterwarnings("ignore:Sparse", "ignore:Using backward")
@pytest.mark.parametrize("loss", [spread, of_some])
@pytest.mark.parametrize("name", ODD)
def test_the_gradient_is_that_of_naive_code(name: str, loss: Loss) -> None:
    odd = ODD[name]
    expected = naive(odd, loss)

    def answer(model: nn.Module, retain: Any) -> SetGradient:
        group = Group("z", odd.shards())
        return set_gradient(
            model, [group], Objective(loss), mode="train", seed=SEED, retain=retain,
            returns=("grads", "buffers"),
        )  # fmt: skip

    model = odd.model().eval()
    before = [(n, _dense(x).clone()) for n, x in model.state_dict().items()]
    plain = [x.detach().clone() for x in _leaves(model)]
    first = answer(model, 0)
    assert difference(first.grads, expected.grads) <= TOLERANCE
    for retain in (1500, 20_000, 10**9, "auto", 0):
        result = answer(model, retain)
        assert result.replay_difference <= REPLAYED
        assert result.loss == first.loss
        assert all(torch.equal(result.grads[n], first.grads[n]) for n in first.grads)
        for n, buffer in expected.buffers.items():
            assert torch.equal(_dense(result.buffers[n]), _dense(buffer))
    assert not model.training
    assert all(torch.equal(_dense(model.state_dict()[n]), x) for n, x in before)
    assert all(torch.equal(x, y) for x, y in zip(_leaves(model), plain, strict=False))
    assert all(leaf.grad is None for leaf in _leaves(model) if leaf.is_leaf)
