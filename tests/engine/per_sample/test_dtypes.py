"""Rows of models that compute in several dtypes are those of the model's own arithmetic."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gradbox_engine.errors import CoupledSamples
from gradbox_engine.per_sample import per_sample_gradient
from tests.engine.per_sample import naive

NEAR = 4 * torch.finfo(torch.bfloat16).eps


class Scaled(nn.Module):
    """bfloat16 layers around a scale in float32, which widens nothing since it has no dim."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(3, 4).bfloat16(), nn.Linear(4, 2).bfloat16()
        self.log_scale = nn.Parameter(torch.tensor(0.3))

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.before(x.bfloat16()) * self.log_scale.exp())


def prelu() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.PReLU(4), nn.Linear(4, 2))


def doubled(output: Tensor, inputs: dict[str, Any]) -> Tensor:
    return output @ (2 * torch.eye(2))


def losses(z: Tensor) -> Tensor:
    return z.square().sum(1)


@pytest.mark.parametrize(
    ("build", "told"),
    [
        (Scaled, {}),
        (prelu, {"precision": "bf16"}),
        (prelu, {"precision": "bf16", "readout": doubled}),
    ],
    ids=["a scale without dims", "a function by vmap", "a readout"],
)
def test_rows_and_losses_are_those_of_the_models_own_dtypes(
    build: Any, told: dict[str, Any]
) -> None:
    torch.manual_seed(0)
    model, x = build(), torch.randn(5, 3)
    with torch.autocast("cpu", torch.bfloat16, enabled="precision" in told):
        z = model(x)
        z = told["readout"](z, {}) if "readout" in told else z
    expected = losses(z.float())
    rows = naive.rows(expected[:, None], dict(model.named_parameters()))
    found = per_sample_gradient(model, [{"0": x}], losses, **told)
    assert torch.equal(found.values, expected.detach())
    for name, row in rows.items():
        torch.testing.assert_close(found.arrays[name], row[:, 0], rtol=NEAR, atol=NEAR)


class Paired(nn.Module):
    """A function without a rule, whose vectorised form rounds otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.paired = nn.Linear(16, 16), nn.Bilinear(16, 16, 4)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.paired(self.before(x), x)
        return found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_functions_are_vectorised_in_16_bits(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model, x = Paired().to(dtype), torch.randn(6, 16, dtype=dtype)
    expected = naive.rows(losses(model(x).float())[:, None], dict(model.named_parameters()))
    found = per_sample_gradient(model, [{"0": x}], lambda z: losses(z.float()))
    assert not found.loops
    for name, rows in expected.items():
        near = 8 * torch.finfo(dtype).eps * float(rows.abs().amax())
        torch.testing.assert_close(found.arrays[name], rows[:, 0], rtol=0.0, atol=near)


class SeesTheFirst(nn.Module):
    """Every sample sees a little of the first one, which the rounding of 16 bits hides in rows."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.before(x)
        found: Tensor = self.after(h + 0.05 * h[:1])
        return found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_samples_that_see_a_little_of_another_are_refused(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model, x = SeesTheFirst().to(dtype), torch.randn(6, 3, dtype=dtype)
    with pytest.raises(CoupledSamples):
        per_sample_gradient(model, [{"0": x}], lambda z: losses(z.float()))
