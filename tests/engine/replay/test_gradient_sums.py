"""Sums of gradients that autograd adds to in place."""

from __future__ import annotations

from typing import ClassVar

import numpy
import pytest
import torch
from torch import Tensor, nn

from gradbox_engine import Group, Objective, set_gradient
from gradbox_engine.replay import gradient_sums
from tests.engine.per_sample.zoo import Written
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


def _alike() -> nn.Module:
    zeros, ones = (torch.full((3,), n, dtype=torch.float64) for n in (0.0, 1.0))
    parts = {"a": nn.Parameter(zeros), "b": nn.Parameter(ones)}
    return Written(lambda m, x: _BothAlike.apply(x.square(), m.a, m.b).sin(), **parts)


class _Giving(torch.autograd.Function):
    """The weight itself as z, whose gradient is a view of the cotangent that was handed in."""

    @staticmethod
    def forward(ctx, weight: Tensor) -> Tensor:
        return weight.clone()

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        return gradient.view(gradient.shape)


def _weight() -> nn.Parameter:
    return nn.Parameter(torch.arange(6.0, dtype=torch.float64).view(2, 3))


def _weight_alone() -> nn.Module:
    return Written(lambda m, x: _Giving.apply(m.weight), weight=_weight())


class _Reusing(torch.autograd.Function):
    """A product with a weight, whose gradient lies in an array that the next call writes to."""

    array = numpy.zeros((2, 3))

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.T

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[None, Tensor]:
        x, _ = ctx.saved_tensors
        _Reusing.array[:] = (gradient.T @ x).numpy()
        return None, torch.from_numpy(_Reusing.array)


def _on_numpy() -> nn.Module:
    return Written(lambda m, x: _Reusing.apply(x, m.weight), weight=_weight())


class _Product(nn.Module):
    """Notes in `given` where the gradients lie that its backward passes give to the weight."""

    given: ClassVar[list[int]] = []

    def __init__(self) -> None:
        super().__init__()
        self.weight = _weight()

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight.expand(2, 3)
        weight.register_hook(lambda gradient: self.given.append(gradient.data_ptr()))
        return x @ weight.T


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
@pytest.mark.parametrize("kind", [_alike, _weight_alone, _Forgetful])
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


@pytest.mark.parametrize("retain", [0, PLENTY])
@pytest.mark.parametrize("counted", [True, False])
def test_a_gradient_in_memory_of_another_library_is_copied(monkeypatch, counted, retain):
    if not counted:
        monkeypatch.setattr(gradient_sums, "num_holders", lambda storage: None)
    shards = [{"0": x} for x in _shards()]
    result = set_gradient(_on_numpy(), [Group("z", shards)], Objective(_loss), retain=retain)
    weight = _weight().detach().requires_grad_()
    _loss(torch.cat([x @ weight.T for x in _shards()])).backward()
    assert difference(result.grads, {"weight": weight.grad}) <= TOLERANCE


@pytest.mark.parametrize("counted", [True, False])
def test_a_gradient_that_nobody_else_holds_becomes_the_sum(monkeypatch, counted):
    if not counted:
        monkeypatch.setattr(gradient_sums, "num_holders", lambda storage: None)
    _Product.given.clear()
    (shard, *_) = _shards()
    result = set_gradient(_Product(), [Group("z", [{"0": shard}])], Objective(_loss))
    weight = _Product().weight.detach().requires_grad_()
    _loss(shard @ weight.T).backward()
    assert difference(result.grads, {"weight": weight.grad}) <= TOLERANCE
    assert (_Product.given == [result.grads["weight"].data_ptr()]) is counted


def test_a_gradient_that_is_part_of_larger_memory_is_copied():
    class _Sliced(_Product):
        def forward(self, x: Tensor) -> Tensor:
            weight = self.weight.expand(2, 3)
            weight.register_hook(lambda g: torch.cat([g, g.new_zeros(1000, 3)])[:2])
            return x @ weight.T

    shards = [{"0": x} for x in _shards()[:1]]
    gradient = set_gradient(_Sliced(), [Group("z", shards)], Objective(_loss)).grads["weight"]
    assert gradient.untyped_storage().nbytes() == gradient.nbytes


def test_a_gradient_that_a_hook_of_the_model_takes_away_does_not_arrive():
    model = nn.Linear(3, 2).double()
    model.weight.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    shards = [{"0": x} for x in _shards()]
    result = set_gradient(model, [Group("z", shards)], Objective(_loss))
    assert result.unreached == ("weight",)
    assert result.grads["bias"].any()


def test_a_gradient_that_a_hook_of_the_model_holds_is_copied():
    held = []
    model = nn.Linear(3, 2).double()
    model.weight.register_post_accumulate_grad_hook(lambda p: held.append(p.grad))
    shards = [{"0": x} for x in _shards()]
    result = set_gradient(model, [Group("z", shards)], Objective(_loss), retain=PLENTY)
    total = sum(gradient for gradient in held if gradient is not None)
    assert len(held) == len(shards)
    assert difference({"weight": result.grads["weight"]}, {"weight": total}) <= TOLERANCE
