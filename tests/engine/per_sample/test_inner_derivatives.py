"""Models with derivatives of their own in their forward pass, as force fields and flows have."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from gradbox_engine.per_sample import per_sample_gradient
from tests.device import DEVICE, moved
from tests.engine.per_sample import naive

DTYPES = [torch.float64, torch.float32, torch.bfloat16]


class _Derivatives(nn.Module):
    """Returns an energy and its derivative by the input, made in one of several ways."""

    def __init__(self) -> None:
        super().__init__()
        self.energy = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))


class _ByAutograd(_Derivatives):
    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        energy = self.energy(x)
        (slope,) = torch.autograd.grad(energy.sum(), x, create_graph=True)
        return torch.cat([energy, slope], 1)


class _ByTransform(_Derivatives):
    def forward(self, x: Tensor) -> Tensor:
        slope = torch.func.vmap(torch.func.grad(lambda row: self.energy(row).sum()))(x)
        return torch.cat([self.energy(x), slope], 1)


class _ByForwardMode(_Derivatives):
    def forward(self, x: Tensor) -> Tensor:
        energy, slope = torch.func.jvp(self.energy, (x,), (x.sin(),))
        return torch.cat([energy, slope], 1)


class _OfAnotherGraph(_Derivatives):
    """Moves its input along the slope first, which it takes as a constant."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad(self.energy(x).sum(), x)
        energy: Tensor = self.energy(x.detach() - slope)
        return energy


def _losses(z: Tensor) -> Tensor:
    return z.float().square().sum(1) if z.dtype == torch.bfloat16 else z.square().sum(1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", [_ByAutograd, _ByTransform, _ByForwardMode, _OfAnotherGraph])
def test_rows_hold_what_a_derivative_adds(kind: type[_Derivatives], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = kind().to(DEVICE, dtype)
    shard = moved({"0": torch.randn(5, 3, dtype=dtype)})
    parameters = dict(model.named_parameters())
    expected = naive.rows(_losses(model(**{"x": shard["0"]}))[:, None], parameters)
    found = per_sample_gradient(model, [shard], _losses)
    near = 8 * torch.finfo(dtype).eps
    for name, rows in expected.items():
        scale = float(rows.float().abs().amax())
        torch.testing.assert_close(found.arrays[name], rows[:, 0], rtol=near, atol=near * scale)


def test_parameters_of_a_model_that_differentiates_are_looped_over() -> None:
    shard = moved({"0": torch.randn(5, 3)})
    looped = per_sample_gradient(_ByAutograd().to(DEVICE), [shard], _losses).loops
    assert set(looped.values()) == {"the model differentiates in its forward pass"}
    assert not per_sample_gradient(_OfAnotherGraph().to(DEVICE), [shard], _losses).loops
