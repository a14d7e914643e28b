"""Buffers that hold a graph when a shard ends: exact where the next shard does not use it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from gradbox_engine import (
    GraphInBuffer,
    Group,
    Objective,
    SetGradient,
    mixed_gradient,
    set_gradient,
    shard_stream,
)
from gradbox_engine.model.state.buffers import Buffers
from gradbox_engine.model.state.snapshots import packed, unpacked
from tests.device import DEVICE, moved
from tests.oracle import TOLERANCE, difference


class _Spiking(nn.Module):
    """Keeps its state in a buffer from step to step, as spiking layers do."""

    state: Tensor

    def __init__(self, start: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.linear = nn.Linear(4, 3).double()
        self.register_buffer("state", torch.zeros(1, 3, dtype=torch.float64))
        self.start = start

    def forward(self, x: Tensor) -> Tensor:
        self.state = self.start(self.state)
        for _ in range(3):
            self.state = 0.7 * self.state + self.linear(x)
        return self.state.tanh()


STARTS: dict[str, Callable[[Tensor], Tensor]] = {
    "anew": lambda state: torch.zeros(1, 3).to(state),
    "detached": lambda state: state.detach().mean(0, keepdim=True),
    "detached in place": lambda state: state.detach_().mean(0, keepdim=True),
}


class _Told(nn.Module):
    """A buffer that is told to require grad, for a term that a call adds to it."""

    zero: Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.linear = nn.Linear(4, 3).double()
        self.register_buffer("zero", torch.zeros((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        z: Tensor = self.linear(x).tanh()
        return z + 2 * self.zero.requires_grad_()


MODELS: dict[str, Callable[[], nn.Module]] = {
    **{name: lambda start=start: _Spiking(start) for name, start in STARTS.items()},  # type: ignore[misc]
    "told to require grad": _Told,
}


def _spread(z: Tensor) -> Tensor:
    return torch.exp(-torch.cdist(z, z).square()).mean()


def _shards() -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(2)
    return [
        moved({"0": torch.randn(n, 4, generator=generator, dtype=torch.float64)}) for n in (3, 2, 4)
    ]


def _found(model: nn.Module, retain: int) -> SetGradient:
    return set_gradient(
        model.to(DEVICE), [Group("z", _shards())], Objective(_spread), mode="train", retain=retain,
        returns=("grads", "buffers"),
    )  # fmt: skip


@pytest.mark.parametrize("retain", [0, 10**9])
@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_those_of_all_graphs(name: str, retain: int) -> None:
    plain = MODELS[name]().to(DEVICE)
    zs = []
    for index, shard in enumerate(_shards()):
        with shard_stream(0, 0, index):
            zs.append(plain(shard["0"]))
    _spread(torch.cat(zs)).backward()
    expected = {n: p.grad for n, p in plain.named_parameters() if p.grad is not None}
    model = MODELS[name]()
    buffers = dict(model.named_buffers())
    for _ in range(2):
        found = _found(model, retain)
        assert difference(found.grads, expected) <= TOLERANCE
        assert found.buffers is not None
        after = {n: buffer.detach() for n, buffer in plain.named_buffers()}
        assert all(torch.equal(found.buffers[n], value) for n, value in after.items())
    assert all(now is buffers[n] for n, now in model.named_buffers())
    assert not any(b.requires_grad or b.any() for b in model.buffers())


@pytest.mark.parametrize("retain", [0, 10**9])
def test_a_gradient_that_would_pass_between_shards_is_refused(retain: int) -> None:
    model = _Spiking(lambda state: state.mean(0, keepdim=True))
    with pytest.raises(GraphInBuffer, match=r"'state'.*anew at the beginning"):
        _found(model, retain)
    assert not model.state.requires_grad


def test_a_checkpoint_knows_which_graphs_were_cut() -> None:
    model = _Spiking(lambda state: state.mean(0, keepdim=True))
    buffers = Buffers(model)
    model(_shards()[0]["0"].cpu())
    states = [buffers.first, buffers.advance(buffers.first)]
    (_, after) = unpacked(packed(states, buffers.beyond), buffers.first, buffers.beyond)
    buffers.restore(after)
    with pytest.raises(GraphInBuffer, match="'state'"):
        model(_shards()[1]["0"].cpu()).sum().backward()


def test_a_mixed_gradient_has_a_direction_of_its_own_shard_alone() -> None:
    y = torch.linspace(-1, 1, 3, dtype=torch.float64, device=DEVICE).requires_grad_()

    def inner(y: Tensor, v: Tensor) -> Tensor:
        return (v @ y).pow(3).sum()

    def outer(dfdz: Tensor) -> Tensor:
        return dfdz.pow(3).sum()

    plain = _Spiking(STARTS["anew"]).to(DEVICE).requires_grad_(False)
    gradients = []
    for shard in _shards():
        z = shard["0"].requires_grad_()
        gradients += torch.autograd.grad(inner(y, plain(z)), z, create_graph=True)
    (expected,) = torch.autograd.grad(outer(torch.cat(gradients)), y)
    found = mixed_gradient(
        _Spiking(STARTS["anew"]).to(DEVICE), Group("z", _shards()),
        Objective(inner, {"y": y}, {"y": y}), Objective(outer), mode="train",
    )  # fmt: skip
    assert difference(found.grads, {"y": expected}) <= 10 * TOLERANCE
