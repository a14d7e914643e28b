"""The comparison of rows with autograd's gradient: what it must see, and what it must let pass."""

from __future__ import annotations

from dataclasses import replace
from math import inf, nan

import pytest
import torch
from torch import Tensor, nn

from gradbox_engine.per_sample import jacobian, per_sample_gradient
from gradbox_engine.per_sample.gradients import leaf_gradients
from gradbox_engine.per_sample.planning.verify import (
    Comparison,
    compare,
    output_change,
    reference,
)
from gradbox_factors import Outer, Term
from tests.engine.per_sample.zoo import build

B, T = 6, 3


def layer(dtype: torch.dtype = torch.float64) -> tuple[nn.Parameter, Tensor, Tensor, Outer]:
    """Return a weight, z, its sums of squares, and the weight's right term."""
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(4, 5, dtype=dtype))
    x = torch.randn(B, T, 5, dtype=dtype)
    z = (x @ weight.T).tanh()
    value = z.square().sum((1, 2))[:, None]
    left = (2 * z * (1 - z.square())).detach()[None]
    return weight, z, value, Outer("w", (4, 5), left, x)


def compared(term: Term, weight: Tensor, z: Tensor, value: Tensor, seed: int) -> Comparison:
    def gradient_at(weights: Tensor) -> dict[str, Tensor | None]:
        return leaf_gradients(value, leaves, weights, leaves=leaves, keep_graph=True)

    leaves = {"w": weight}
    expected = reference(z, value, gradient_at, seed=seed)
    return compare(expected, {"w": term}, rounding=torch.float64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("seed", range(3))
def test_right_rows_are_confirmed(dtype: torch.dtype, seed: int) -> None:
    weight, z, value, term = layer(dtype)
    assert compared(term, weight, z, value, seed) == Comparison(frozenset(), frozenset({"w"}))


def _one_row_larger(term: Outer) -> Outer:
    left = term.left.clone()
    left[:, 4] *= 1.1
    return replace(term, left=left)


def _two_rows_exchanged(term: Outer) -> Outer:
    order = torch.tensor([0, 1, 3, 2, 4, 5])
    return replace(term, left=term.left[:, order], right=term.right[order])


def _a_position_missing(term: Outer) -> Outer:
    return replace(term, left=term.left[:, :, 1:], right=term.right[:, 1:])


def _the_batch_in_every_row(term: Outer) -> Outer:
    return replace(term, left=term.left.mean(1, keepdim=True).expand_as(term.left))


@pytest.mark.parametrize(
    "change", [_one_row_larger, _two_rows_exchanged, _a_position_missing, _the_batch_in_every_row]
)
@pytest.mark.parametrize("seed", range(3))
def test_wrong_rows_are_seen(change: object, seed: int) -> None:
    assert callable(change)
    weight, z, value, term = layer()
    assert compared(change(term), weight, z, value, seed).wrong == {"w"}


@pytest.mark.parametrize("size", [1e-30, 1e-20, 1e18])
def test_rows_whose_squares_float32_does_not_hold_are_compared(size: float) -> None:
    weight, z, value, term = layer(torch.float32)
    scaled = replace(term, left=term.left * size)
    z_scaled = z * size  # the norm of ∂v/∂z is taken out of the weights
    value = z_scaled.detach()[:, 0, :1] * 0 + value * size
    assert compared(scaled, weight, z, value, 0).confirmed == {"w"}
    wrong = _two_rows_exchanged(scaled)
    assert compared(wrong, weight, z, value, 0).wrong == {"w"}


def test_a_gradient_of_zero_confirms_nothing() -> None:
    weight, z, value, term = layer()
    zero = replace(term, left=term.left * 0)
    assert compared(zero, weight, z, value * 0, 0) == Comparison(frozenset(), frozenset())


@pytest.mark.parametrize("seed", [0, 1, -1, 2**63])
def test_any_seed_gives_weights(seed: int) -> None:
    weight, z, value, term = layer()
    assert compared(term, weight, z, value, seed).confirmed == {"w"}


@pytest.mark.parametrize("samples", [2, 64])
def test_no_two_samples_of_an_output_have_the_same_weight(samples: int) -> None:
    z = torch.randn(samples, 3)
    for seed in range(50):
        weights = reference(None, z, lambda weights: {"z": weights}, seed=seed).weights
        assert all(len(column.unique()) == samples for column in weights.T)
        assert ((weights.abs() >= 0.5) & (weights.abs() <= 1.5)).all()


@pytest.mark.parametrize(
    ("alone", "in_batch", "change"),
    [
        ([1.0, 1e-6], [1.0, 2e-6], 0),  # equal, and small by chance
        ([1.0, 2.0], [1.0, 1.0], 1.0),
        ([-1e9, 1.1], [-1e9, 1.0], 0.1),  # a masked logit is no scale
        ([-inf, nan], [-inf, nan], 0),
        ([-inf, 1.1], [-inf, 1.0], 0.1),
        ([nan, 1.0], [0.0, 1.0], inf),
        ([1.0, 1.0], [0.0, 0.0], inf),
    ],
)
def test_an_output_called_alone_is_that_of_the_batch_but_for_rounding(
    alone: list[float], in_batch: list[float], change: float
) -> None:
    z = torch.tensor([[0.5, -0.7], in_batch, [-1.0, 0.3]])
    found = output_change(torch.tensor([alone]), z, 1, rounding=torch.float64)
    assert found == pytest.approx(change, rel=1e-5)


@pytest.mark.parametrize("form", ["dense", "factored"])
def test_a_rule_that_is_wrong_is_found_in_every_job(
    monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    """Also where the plan was confirmed by an earlier job."""
    model, inputs = build("linear over positions")
    expected = jacobian(model, [inputs]).arrays["a.weight"]
    monkeypatch.setattr(Outer, "narrow", Outer.narrow)
    original = Outer.vjp
    monkeypatch.setattr(Outer, "vjp", lambda self, u: 1.01 * original(self, u))
    result = jacobian(model, [inputs], form=form)  # type: ignore[arg-type]
    assert set(result.loops) == {"a.weight"}
    found = (
        result.arrays["a.weight"] if result.factors is None else result.factors.block("a.weight")
    )
    torch.testing.assert_close(found, expected)


def test_no_array_of_all_rows_is_made_for_the_comparison(monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = build("embedding twice and tied")
    largest: list[int] = []
    rows = Term.block

    def noted(self: Term) -> Tensor:
        largest.append(self.samples)
        return rows(self)

    monkeypatch.setattr(Term, "block", noted)
    per_sample_gradient(model, [inputs], lambda z: z.square().sum(1), form="factored")
    assert not largest
