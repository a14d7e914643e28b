"""Hooks that change gradients on their way change rows alike, however small these are."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from gradbox_engine.per_sample import jacobian
from tests.device import DEVICE, moved
from tests.engine.per_sample import naive

DTYPES = [torch.float64, torch.bfloat16]


class _HookedOutput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.layer(x)
        if h.requires_grad:
            h.register_hook(lambda gradient: gradient / 4)
        return h.tanh()


def _hooked_weight() -> nn.Module:
    layer = nn.Linear(4, 4)
    layer.weight.register_hook(lambda gradient: gradient / 4)
    return layer


def _model(hooked: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Return a model in which the hooked layer's gradient is small beside that of the last one."""
    head = nn.Linear(4, 3)
    with torch.no_grad():
        head.weight.mul_(0.02)
    return nn.Sequential(nn.Linear(4, 4), hooked, head).to(DEVICE, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(5, 4), (5, 3, 4)])
@pytest.mark.parametrize("hooked", [_HookedOutput, _hooked_weight])
def test_rows_are_those_that_hooks_leave(
    hooked: type[nn.Module], shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    model, shard = _model(hooked(), dtype), moved({"input": torch.randn(shape, dtype=dtype)})
    z = model(shard["input"]).flatten(1)
    expected = naive.rows(
        z.float() if dtype == torch.bfloat16 else z, dict(model.named_parameters())
    )
    found = jacobian(model, [shard], readout=lambda z, _: z.flatten(1))
    for name, rows in expected.items():
        near = 8 * torch.finfo(dtype).eps * float(rows.abs().amax())
        torch.testing.assert_close(found.arrays[name], rows, rtol=0.0, atol=near)
    assert set(found.loops.values()) <= {"a hook changes its gradient"}
