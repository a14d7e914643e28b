"""Custom Functions whose backward calls `backward`, which adds to parameters by itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gradbox_engine.per_sample import jacobian, per_sample_gradient
from tests.device import DEVICE, moved
from tests.engine.per_sample import naive


class _Run(torch.autograd.Function):
    """A block without a graph, which its backward makes again: as reversible layers do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, block: nn.Module) -> Tensor:  # type: ignore[override]
        ctx.x, ctx.block = x.detach(), block
        with torch.no_grad():
            found: Tensor = block(x)
        return found

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Any:  # type: ignore[override]
        x = ctx.x.detach().requires_grad_()
        with torch.enable_grad():
            torch.autograd.backward(ctx.block(x), cotangent)
        return x.grad, None


class _Reversible(nn.Module):
    """Layers around a block that keeps no graph."""

    def __init__(self, *, kept: bool = False) -> None:
        super().__init__()
        self.kept = kept
        self.before = nn.Linear(4, 4)
        self.block = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4))
        self.after = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.before(x)
        h = h + (self.block(h) if self.kept else _Run.apply(h, self.block))  # type: ignore[no-untyped-call]
        z: Tensor = self.after(h.tanh())
        return z


def _models() -> tuple[nn.Module, nn.Module, dict[str, Tensor]]:
    """Return the model, the same with a graph throughout, and a shard."""
    torch.manual_seed(0)
    model, plain = _Reversible().double().to(DEVICE), _Reversible(kept=True).double().to(DEVICE)
    plain.load_state_dict(model.state_dict())
    return model, plain, moved({"0": torch.randn(5, 4, dtype=torch.float64)})


def test_rows_hold_what_a_backward_pass_inside_adds() -> None:
    model, plain, shard = _models()
    expected = naive.flat(naive.jacobian(plain, shard))
    for _ in range(2):
        result = jacobian(model, [shard])
        assert naive.difference(naive.flat(result.arrays), expected) <= naive.TOLERANCE
        assert result.loops.keys() == {f"block.{n}" for n, _ in plain.block.named_parameters()}
    assert all(parameter.grad is None for parameter in model.parameters())


def test_rows_of_one_outputs_loss_do_as_well() -> None:
    model, plain, shard = _models()
    expected = naive.flat(naive.jacobian(plain, shard)).sum(1)
    result = per_sample_gradient(model, [shard], lambda z: z.sum(1))
    assert naive.difference(naive.flat(result.arrays, lead=1), expected) <= naive.TOLERANCE


@pytest.mark.parametrize("wrt", [None, ["before.*", "block.2.*"]])
def test_a_product_with_cotangents_does_as_well(wrt: list[str] | None) -> None:
    model, plain, shard = _models()
    vectors = torch.randn(5, 3, dtype=torch.float64, device=DEVICE)
    rows = naive.jacobian(plain, shard)
    result = jacobian(model, [shard], reduce="vjp", vectors=vectors, wrt=wrt)
    for name, found in result.arrays.items():
        expected = torch.einsum("by,by...->...", vectors, rows[name])
        assert naive.difference(found, expected) <= naive.TOLERANCE
