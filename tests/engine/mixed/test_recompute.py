"""A mixed gradient whose model's blocks are computed again."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from gradbox_engine import Group, MixedResult, Objective, mixed_gradient
from gradbox_engine.requests import Recomputed
from tests.device import same_bits
from tests.engine.model.test_recompute import Residual, crowded

WIDTH = 8


def mixed(model: nn.Module, recompute: str) -> MixedResult:
    torch.manual_seed(1)
    y = torch.randn(WIDTH, WIDTH).requires_grad_()
    return mixed_gradient(
        model,
        Group("z", [{"0": torch.randn(n, WIDTH)} for n in (4, 4)]),
        Objective(inner, parameters={"y": y}, inputs={"y": y}),
        Objective(lambda dfdz: dfdz.square().sum()),
        mode="train",
        returns=("dfdz",),
        recompute=recompute,
    )


def inner(v: Tensor, y: Tensor) -> Tensor:
    return ((v @ y).tanh() * v).sum()


class OwnFunction(torch.autograd.Function):
    """Without a rule for forward mode."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradient * x.cos()


class Sine(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return OwnFunction.apply(x)


@pytest.mark.parametrize("tail", [nn.Tanh, Sine])
def test_recomputed_blocks_do_not_show(tail):
    torch.manual_seed(0)
    model = nn.Sequential(*(Residual(WIDTH) for _ in range(3)), tail())
    off, on = (mixed(model, recompute) for recompute in ("off", "blocks"))
    assert on.recomputed == Recomputed(("0", "1"), 2)
    assert on.fallbacks == off.fallbacks
    assert bool(on.fallbacks) == (tail is Sine)
    assert same_bits(on.dfdz, off.dfdz)
    assert all(same_bits(on.grads[n], off.grads[n]) for n in off.grads)


def test_a_first_pass_that_does_not_fit_is_recomputed():
    with pytest.raises(torch.OutOfMemoryError):
        mixed(crowded(1), "off")
    assert mixed(crowded(1), "auto").recomputed.shards == 2
