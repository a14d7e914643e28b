"""A change in place behind a layer or before it takes nothing away from the rows."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from gradbox_engine.errors import ModelCallFailed
from gradbox_engine.per_sample import jacobian, per_sample_gradient
from tests.engine.per_sample import naive
from tests.engine.per_sample.zoo import Written


def _squares(z: Tensor) -> Tensor:
    return z.square().sum(1)


def test_a_bias_needs_no_input_that_is_changed_in_place_later() -> None:
    def forward(m: nn.Module, x: Tensor) -> Tensor:
        h = x * 2
        h += m.a(h)  # type: ignore[operator]
        return m.b(h)  # type: ignore[operator,no-any-return]

    torch.manual_seed(1)
    model = Written(forward, a=nn.Linear(5, 5), b=nn.Linear(5, 3)).double()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.endswith("bias"))
    inputs = {"0": torch.randn(6, 5, dtype=torch.float64)}
    biases = {name: p for name, p in model.named_parameters() if p.requires_grad}
    expected = naive.flat(naive.rows(_squares(naive.outputs(model, inputs))[:, None], biases))[:, 0]
    result = per_sample_gradient(model, [inputs], _squares, wrt=["*bias"])
    assert naive.difference(naive.flat(result.arrays, lead=1), expected) <= naive.TOLERANCE


@pytest.mark.parametrize(
    "call",
    [
        lambda model, inputs: per_sample_gradient(model, [inputs], _squares),
        lambda model, inputs: jacobian(model, [inputs], reduce="vjp", vectors=torch.ones(6, 3)),
    ],
    ids=["rows", "vjp"],
)
def test_a_change_in_place_that_autograd_refuses_is_the_models_fault(
    call: Callable[..., object],
) -> None:
    def forward(m: nn.Module, x: Tensor) -> Tensor:
        return m.b(m.a(x).sigmoid().mul_(2))  # type: ignore[operator,no-any-return]

    model = Written(forward, a=nn.Linear(5, 4), b=nn.Linear(4, 3))
    with pytest.raises(ModelCallFailed, match=r"shard 0: the backward pass.*inplace"):
        call(model, {"0": torch.randn(6, 5)})
