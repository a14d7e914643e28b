"""Outer products and their Grams, by each way of making them, against einsum in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gradbox_factors import Factored, Outer, Positions, Term

DOUBLE = torch.float64
TOLERANCE = 1e-12

# Y, B, T, O, I: a broadcast where T is 1, else a matrix product
SIZES = [(2, 3, 1, 5, 7), (1, 3, 1, 70, 100), (1, 2, 3, 5, 7), (2, 2, 3, 200, 200)]


def made(*sizes: int, seed: int = 0) -> Tensor:
    return torch.randn(sizes, dtype=DOUBLE, generator=torch.Generator().manual_seed(seed))


def outer(sizes: tuple[int, ...], *, transposed: bool = False) -> tuple[Outer, Tensor]:
    """Return a term and the array that it stands for."""
    Y, B, T, rows, columns = sizes
    left, right = made(Y, B, T, rows), made(B, T, columns, seed=1)
    array = torch.einsum("ybto,bti->byio" if transposed else "ybto,bti->byoi", left, right)
    return Outer("w", tuple(array.shape[2:]), left, right, transposed), array


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("sizes", SIZES)
def test_an_outer_term_is_written_over_anything_and_added_to_anything(
    sizes: tuple[int, ...], transposed: bool
) -> None:
    term, array = outer(sizes, transposed=transposed)
    out = torch.full(array.shape, float("nan"), dtype=DOUBLE)
    term.write(out, accumulate=False)
    torch.testing.assert_close(out, array, rtol=TOLERANCE, atol=TOLERANCE)
    term.write(out, accumulate=True)
    torch.testing.assert_close(out, 2 * array, rtol=TOLERANCE, atol=TOLERANCE)


def layer(name: str, left: Tensor, right: Tensor) -> dict[str, Term]:
    shape = (left.shape[-1], right.shape[-1])
    return {
        f"{name}.weight": Outer(f"{name}.weight", shape, left, right),
        f"{name}.bias": Positions(f"{name}.bias", shape[:1], left),
    }


def steady(Y: int, B: int, rows: int, *, seed: int = 0) -> Tensor:
    """Output gradients that no sample changes, as those of z are."""
    return made(Y, 1, 1, rows, seed=seed).expand(Y, B, 1, rows).contiguous()


def nearly_steady(Y: int, B: int, rows: int) -> Tensor:
    """The first and the last sample are alike, one between them is not."""
    left = steady(Y, B, rows)
    left[-1, 1] += 1
    return left


@pytest.mark.parametrize("last", [steady, nearly_steady])
@pytest.mark.parametrize("hidden", [True, False])
@pytest.mark.parametrize("shards", [1, 2])
def test_grams_of_steady_and_of_varying_output_gradients(
    last: object, hidden: bool, shards: int
) -> None:
    Y, B = 3, 4
    pieces = []
    for seed in range(shards):
        terms = layer("b", last(Y, B, 3), made(B, 1, 20, seed=seed))  # type: ignore[operator]
        if hidden:
            terms |= layer("a", made(Y, B, 1, 20, seed=seed), made(B, 1, 30, seed=seed + 9))
        pieces.append(terms)
    factors = Factored(pieces)
    rows = torch.cat([factors.block(name).flatten(2) for name in factors.names], 2)
    expected = torch.einsum("byp,czp->bycz", rows, rows)
    torch.testing.assert_close(factors.gram(), expected, rtol=TOLERANCE, atol=1e-10)
    traced = torch.einsum("byp,cyp->bc", rows, rows)
    torch.testing.assert_close(factors.gram(trace=True), traced, rtol=TOLERANCE, atol=1e-10)


@pytest.mark.parametrize("B", [1, 2, 7])
def test_the_gram_of_one_output_is_whole_for_any_number_of_samples(B: int) -> None:
    terms = layer("a", made(1, B, 1, 20), made(B, 1, 30, seed=1))
    terms |= layer("b", made(1, B, 1, 10, seed=2), made(B, 1, 20, seed=3))
    factors = Factored([terms])
    rows = torch.cat([factors.block(name).flatten(2) for name in factors.names], 2).squeeze(1)
    torch.testing.assert_close(factors.gram().view(B, B), rows @ rows.T, rtol=TOLERANCE, atol=1e-10)
    squared = sum(factors.squared_norms().values())
    torch.testing.assert_close(squared, rows.square().sum(1, keepdim=True), rtol=TOLERANCE, atol=0)


def test_one_hot_output_gradients_leave_other_outputs_apart() -> None:
    left = torch.eye(3, dtype=DOUBLE)[:, None, None].expand(3, 4, 1, 3)
    factors = Factored([layer("w", left, made(4, 1, 20))])
    gram = factors.gram()
    assert gram[:, 0, :, 1].count_nonzero() == 0
    right = made(4, 20)
    torch.testing.assert_close(gram[:, 2, :, 2], right @ right.T + 1)
