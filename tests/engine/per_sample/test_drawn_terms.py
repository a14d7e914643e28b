"""The algebra of random factors is that of the arrays they stand for, from a result file too."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from gradbox import GradResult
from gradbox_factors import DenseProjection, Factored, Outer, Sketch
from gradbox_worker.computations.factors import described
from tests.client.test_factor_checks import result
from tests.engine.per_sample.drawn_terms import DOUBLE, DrawnRows, rows_of

NUM_DRAWS = 40
TOLERANCE = 1e-10  # float64, next to the largest of rows whose positions may cancel to 1e-6
DIM = 7
SLICES = (slice(None), slice(1, None), slice(None, -1), slice(0, None, 2))


def draws(num: int) -> list[object]:
    many = pytest.param(range(num, 1000), marks=pytest.mark.slow, id="many")
    return [pytest.param(range(num), id="some"), many]


def expect(found: Tensor, expected: Tensor, what: object) -> None:
    assert found.shape == expected.shape, what
    largest = expected.abs().max().clamp(min=1.0) if expected.numel() else 1.0
    assert torch.all((found.double() - expected).abs() <= TOLERANCE * largest), what


def check_rows(factors: Factored, rows: dict[str, Tensor]) -> None:
    """Hold slices and norms of every parameter to its rows."""
    squares = factors.squared_norms()
    for name, expected in rows.items():
        shape = factors.pieces[0][name].shape
        whole = expected.view(*expected.shape[:2], *shape)
        for samples in SLICES:
            for outputs in SLICES:
                found = factors.block(name, samples, outputs)
                expect(found, whole[samples][:, outputs], (name, samples, outputs))
        expect(squares[name], expected.square().sum(2), name)


def check_products(factors: Factored, rows: dict[str, Tensor], numbers: torch.Generator) -> None:
    """Hold what is summed over parameters to all rows side by side."""
    whole = torch.cat(list(rows.values()), 2)
    expect(factors.norms(), whole.norm(dim=2), "norms")
    expect(factors.gram(), torch.einsum("byp,czp->bycz", whole, whole), "gram")
    expect(factors.gram(trace=True), torch.einsum("byp,cyp->bc", whole, whole), "trace")
    tangents = {
        name: torch.randn(term.shape, dtype=DOUBLE, generator=numbers)
        for name, term in factors.pieces[0].items()
    }
    tangent = torch.cat([x.flatten() for x in tangents.values()])
    expect(factors.jvp(tangents), whole @ tangent, "jvp")
    cotangents = torch.randn(whole.shape[:2], dtype=DOUBLE, generator=numbers)
    for name, summed in factors.vjp(cotangents).items():
        expected = torch.einsum("by,byp->p", cotangents, rows[name])
        expect(summed.flatten(), expected, ("vjp", name))


def check_projections(factors: Factored, rows: dict[str, Tensor]) -> None:
    sketched, signed = 0, 0
    for name, term in factors.pieces[0].items():
        P = rows[name].shape[2]
        grid = Sketch(DIM).grid(
            name, 0, term.num_rows, P // term.num_rows, device=torch.device("cpu")
        )
        bucket, sign = (part.flatten() for part in grid)
        sketched += rows[name] @ torch.zeros(P, DIM, dtype=DOUBLE).scatter(
            1, bucket[:, None], sign[:, None].double()
        )
        signed += rows[name] @ DenseProjection("rademacher", DIM).entries(
            name, torch.arange(P), 0, DIM
        )
    expect(factors.projection(DIM), sketched, "sketch")
    expect(factors.projection(DIM, kind="rademacher"), signed / DIM**0.5, "rademacher")


@pytest.mark.parametrize("seeds", draws(NUM_DRAWS))
def test_drawn_factors_are_the_arrays_they_stand_for(seeds: range) -> None:
    for seed in seeds:
        drawn, numbers = DrawnRows(seed), torch.Generator().manual_seed(seed)
        check_rows(drawn.factors, drawn.rows)
        check_products(drawn.factors, drawn.rows, numbers)
        check_projections(drawn.factors, drawn.rows)


@pytest.mark.parametrize("seeds", draws(NUM_DRAWS))
def test_drawn_factors_meet_those_of_other_shards(seeds: range) -> None:
    for seed in seeds:
        drawn = DrawnRows(seed)
        other = drawn.more(2)
        mine = torch.cat(list(drawn.rows.values()), 2)
        theirs = torch.cat(list(rows_of(other).values()), 2)
        found = drawn.factors.gram_with(other)
        expect(found, torch.einsum("byp,czp->bycz", mine, theirs), seed)
        found = drawn.factors.gram_with(other, trace=True)
        expect(found, torch.einsum("byp,cyp->bc", mine, theirs), seed)


@pytest.mark.parametrize("seeds", draws(NUM_DRAWS))
def test_drawn_factors_are_read_from_a_file(seeds: range, tmp_path: Path) -> None:
    for seed in seeds:
        drawn = DrawnRows(seed)
        found = written(drawn.factors, tmp_path)
        for name, expected in drawn.rows.items():
            lazy = found.grads[name]
            whole = expected.view(lazy.shape)
            for index in [(), (0,), (slice(None), -1), (..., 0), ([0],), (None, slice(0, 1))]:
                expect(lazy[index], whole[index], (seed, name, index))
        whole = torch.cat(list(drawn.rows.values()), 2)
        expect(found.gram_trace(), torch.einsum("byp,cyp->bc", whole, whole), seed)


def written(factors: Factored, folder: Path) -> GradResult:
    tensors, metadata = described(factors)
    return result(
        folder,
        {name: tensor.clone() for name, tensor in tensors.items()},
        metadata["gradbox_factors"],
        names=list(factors.names),
        samples=factors.samples,
        y=factors.outputs,
    )


def test_a_factor_off_by_a_millionth_is_seen() -> None:
    left, right = torch.ones(1, 2, 1, 3, dtype=DOUBLE), torch.ones(2, 1, 4, dtype=DOUBLE)
    factors = Factored([{"w": Outer("w", (3, 4), left, right * (1 + 1e-6))}])
    rows = rows_of(Factored([{"w": Outer("w", (3, 4), left, right)}]))
    with pytest.raises(AssertionError):
        check_rows(factors, rows)
    with pytest.raises(AssertionError):
        check_products(factors, rows, torch.Generator())
    with pytest.raises(AssertionError):
        check_projections(factors, rows)
