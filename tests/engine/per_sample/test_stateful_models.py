"""A model that writes to its arguments or its buffers gets the same of both in every call."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from gradbox_engine.per_sample import per_sample_gradient
from tests.engine.per_sample import naive
from tests.engine.per_sample.zoo import Written


def _squares(z: Tensor) -> Tensor:
    return z.square().sum(1)


def _x() -> Tensor:
    torch.manual_seed(0)
    return torch.randn(6, 5, dtype=torch.float64)


def _expected(model: nn.Module, x: Tensor) -> Tensor:
    losses = _squares(naive.outputs(model, {"0": x}))[:, None]
    return naive.flat(naive.rows(losses, dict(model.named_parameters())))[:, 0]


def test_a_model_that_changes_its_input_leaves_the_callers_alone() -> None:
    model = Written(lambda m, x: m.a(x.sub_(0.5).div_(0.25)), a=nn.Linear(5, 3)).double()
    x = _x()
    expected = _expected(model, x.clone())
    found = per_sample_gradient(model, [{"0": x}], _squares)
    assert torch.equal(x, _x())
    assert naive.difference(naive.flat(found.arrays, lead=1), expected) <= naive.TOLERANCE


def _grown(m: nn.Module, x: Tensor) -> Tensor:
    if m.at.shape[0] < x.shape[1]:
        m.at = torch.arange(x.shape[1], dtype=x.dtype)
    return m.a(x + m.at)  # type: ignore[operator,no-any-return]


def _registered(m: nn.Module, x: Tensor) -> Tensor:
    if not hasattr(m, "late"):
        m.register_buffer("late", torch.arange(x.shape[1], dtype=x.dtype))
    return m.a(x + m.late)  # type: ignore[operator,no-any-return]


@pytest.mark.parametrize("forward", [_grown, _registered])
def test_a_buffer_made_in_the_forward_pass_counts(forward: Callable[..., Tensor]) -> None:
    def model() -> nn.Module:
        torch.manual_seed(1)
        built = Written(forward, a=nn.Linear(5, 3)).double()
        built.register_buffer("at", torch.zeros(1, dtype=torch.float64), persistent=False)
        return built

    used = model()
    found = per_sample_gradient(used, [{"0": _x()}], _squares)
    expected = _expected(model(), _x())
    assert naive.difference(naive.flat(found.arrays, lead=1), expected) <= naive.TOLERANCE
    assert {name: tuple(x.shape) for name, x in used.named_buffers()} == {"at": (1,)}


@pytest.mark.parametrize(
    "normed", [nn.utils.spectral_norm, nn.utils.parametrizations.spectral_norm]
)
def test_power_iterations_of_the_trial_runs_are_no_coupling(
    normed: Callable[[nn.Module], nn.Module],
) -> None:
    def model() -> nn.Module:
        torch.manual_seed(1)
        return nn.Sequential(normed(nn.Linear(5, 8)), nn.ReLU(), nn.Linear(8, 3)).double()

    found = per_sample_gradient(model(), [{"0": _x()}], _squares, mode="train")
    expected = _expected(model().train(), _x())
    assert naive.difference(naive.flat(found.arrays, lead=1), expected) <= naive.TOLERANCE
