"""Models whose forward pass is itself a derivative: forces from an energy."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from gradbox_engine import Group, Objective, set_gradient, shard_stream
from tests.oracle import TOLERANCE, difference


class _Forces(nn.Module):
    """−∂energy/∂positions, with dropout in the energy and a mean of what it has seen."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.energy = nn.Sequential(
            nn.Linear(5, 8), nn.Tanh(), nn.Dropout(0.3), nn.Linear(8, 1)
        ).double()
        self.register_buffer("mean", torch.zeros(5).double())

    def forward(self, x: Tensor) -> Tensor:
        self.mean.mul_(0.5).add_(x.detach().mean(0))
        x = (x - self.mean).detach().requires_grad_()
        return -self.gradient(x)

    def gradient(self, x: Tensor) -> Tensor:
        raise NotImplementedError


class _ByAutograd(_Forces):
    def gradient(self, x: Tensor) -> Tensor:
        return torch.autograd.grad(self.energy(x).sum(), x, create_graph=True)[0]


class _ByFunc(_Forces):
    def gradient(self, x: Tensor) -> Tensor:
        return torch.func.grad(lambda x: self.energy(x).sum())(x)


def _shards() -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [{"0": torch.randn(3, 5, generator=generator, dtype=torch.float64)} for _ in range(4)]


def _loss(z: Tensor) -> Tensor:
    return (z @ z.T).exp().mean()


@pytest.mark.parametrize("retain", [0, 10**9])
@pytest.mark.parametrize("kind", [_ByAutograd, _ByFunc])
def test_the_gradient_is_that_of_naive_code(kind, retain):
    model = kind().train()
    zs = []
    for i, shard in enumerate(_shards()):
        with shard_stream(5, 0, i):
            zs.append(model(shard["0"]))
    _loss(torch.cat(zs)).backward()
    calls, called = [], kind()
    called.register_forward_pre_hook(lambda *_: calls.append(1))
    result = set_gradient(
        called,
        [Group("z", _shards())],
        Objective(_loss),
        mode="train",
        seed=5,
        retain=retain,
        returns=("buffers",),
    )
    expected = {
        name: torch.zeros_like(p) if p.grad is None else p.grad
        for name, p in model.named_parameters()
    }
    assert difference(result.grads, expected) <= TOLERANCE
    # Graphs under torch.func cannot be measured, so all but the last one go.
    kept_all = retain > 0 and kind is _ByAutograd
    assert (result.retained, result.replayed) == ((4, 0) if kept_all else (1, 3))
    tried_in_vain = retain > 0 and not kept_all  # once, by the first shard
    assert len(calls) == 4 + result.replayed + tried_in_vain
    assert torch.equal(result.buffers["mean"], model.mean)


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
