"""Sums of gradients that autograd adds to in place."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from gradbox_engine import Group, Objective, set_gradient
from tests.oracle import TOLERANCE, difference

PLENTY = 10**9


class _BothAlike(torch.autograd.Function):
    """x + a + b, whose backward pass gives a and b one and the same memory."""

    @staticmethod
    def forward(ctx, x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return x + a + b

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        summed = gradient.sum(0)
        return gradient, summed.view(-1), summed.view(-1)


class _Alike(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.zeros(3, dtype=torch.float64))
        self.b = nn.Parameter(torch.ones(3, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return _BothAlike.apply(x.square(), self.a, self.b).sin()


class _Giving(torch.autograd.Function):
    """The weight itself as z, whose gradient is a view of the cotangent that was handed in."""

    @staticmethod
    def forward(ctx, weight: Tensor) -> Tensor:
        return weight.clone()

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        return gradient.view(gradient.shape)


class _Weight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(6.0, dtype=torch.float64).view(2, 3))

    def forward(self, x: Tensor) -> Tensor:
        return _Giving.apply(self.weight)


class _Forgetful(nn.Module):
    """Clears its own gradients whenever it is called."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(3, 2).double()

    def forward(self, x: Tensor) -> Tensor:
        self.zero_grad(set_to_none=False)
        return self.linear(x).tanh()


def _loss(z: Tensor) -> Tensor:
    return (z * torch.arange(1.0, 1.0 + z.numel(), dtype=z.dtype).view(z.shape)).square().sum()


def _shards() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, 3, generator=generator, dtype=torch.float64) for _ in range(4)]


@pytest.mark.parametrize("retain", [0, PLENTY])
@pytest.mark.parametrize("kind", [_Alike, _Weight, _Forgetful])
def test_a_sum_has_memory_of_its_own(kind, retain):
    model = kind()
    outputs = [model(x) for x in _shards()]
    parameters = dict(model.named_parameters())
    gradients = torch.autograd.grad(_loss(torch.cat(outputs)), list(parameters.values()))
    job = kind()
    given = torch.ones_like(next(job.parameters()))
    next(job.parameters()).grad = given
    shards = [{"0": x} for x in _shards()]
    result = set_gradient(
        job, [Group("z", shards)], Objective(_loss), retain=retain, returns=("grads", "cotangents")
    )
    assert difference(result.grads, dict(zip(parameters, gradients, strict=True))) <= TOLERANCE
    z = torch.cat(outputs).detach().requires_grad_()
    _loss(z).backward()
    torch.testing.assert_close(result.cotangents["z"], z.grad)
    assert next(job.parameters()).grad is given
