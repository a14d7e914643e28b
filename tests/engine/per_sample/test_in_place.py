"""A change in place behind a layer or before it takes nothing away from the rows."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gradbox_engine.errors import ModelCallFailed
from gradbox_engine.per_sample import jacobian, per_sample_gradient
from tests.engine.per_sample import naive
from tests.engine.per_sample.zoo import Written


def _squares(z: Tensor) -> Tensor:
    return z.square().sum(1)


def _relu(m: nn.Module, x: Tensor) -> Tensor:
    return m.b(F.relu(m.a(x), inplace=True)).mean(1)  # type: ignore[operator,no-any-return]


def _checkpointed(m: nn.Module, x: Tensor) -> Tensor:
    h = checkpoint(lambda y: F.relu(m.a(y), inplace=True), x, use_reentrant=False)
    return m.b(h).mean(1)  # type: ignore[operator,no-any-return]


def _slice(m: nn.Module, x: Tensor) -> Tensor:
    h = m.a(x)  # type: ignore[operator]
    h[..., :2] = h[..., 2:] * 3
    return m.b(h).mean(1)  # type: ignore[operator,no-any-return]


@pytest.mark.parametrize("forward", [_relu, _checkpointed, _slice])
@pytest.mark.parametrize("unchecked", [[], ["self"]])
def test_a_change_in_place_behind_a_linear_layer_keeps_its_rows(
    forward: Callable[..., Tensor], unchecked: list[str]
) -> None:
    torch.manual_seed(1)
    model = Written(forward, a=nn.Linear(5, 4), b=nn.Linear(4, 3)).double()
    inputs = {"0": torch.randn(6, 4, 5, dtype=torch.float64)}
    losses = _squares(naive.outputs(model, inputs))[:, None]
    expected = naive.flat(naive.rows(losses, dict(model.named_parameters())))[:, 0]
    result = per_sample_gradient(model, [inputs], _squares, unchecked=unchecked)
    assert naive.difference(naive.flat(result.arrays, lead=1), expected) <= naive.TOLERANCE
    assert not result.loops


def _table(m: nn.Module, x: Tensor) -> Tensor:
    made = m.a(m.places)  # type: ignore[operator]
    made /= 2
    made = F.relu(made, inplace=True)
    return m.b(x.tanh()).tanh() * made.mean((0, 1))  # type: ignore[operator,no-any-return]


def _used_before(m: nn.Module, x: Tensor) -> Tensor:
    made = m.a(m.places)  # type: ignore[operator]
    before = x @ made[0]
    made[:, 1:] = made[:, :1] * 2
    made *= 3
    return m.b(x) * made[0, 1] + before  # type: ignore[operator,no-any-return]


@pytest.mark.parametrize("forward", [_table, _used_before])
def test_a_change_in_place_of_what_is_made_of_parameters_alone_costs_no_loop(
    forward: Callable[..., Tensor],
) -> None:
    torch.manual_seed(1)
    model = Written(forward, a=nn.Linear(2, 4), b=nn.Linear(4, 4)).double()
    model.register_buffer("places", torch.randn(3, 4, 2, dtype=torch.float64))
    inputs = {"0": torch.randn(6, 4, dtype=torch.float64)}
    expected = naive.flat(naive.jacobian(model, inputs))
    for _ in range(2):  # with a new plan, and with one that is kept
        found = jacobian(model, [inputs], unchecked=["self"])
        assert naive.difference(naive.flat(found.arrays), expected) <= naive.TOLERANCE
        assert not found.loops


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
