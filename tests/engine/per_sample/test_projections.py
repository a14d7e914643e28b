"""Projections by random matrices: of the rows alone, and as far off as is said."""

from __future__ import annotations

from typing import get_args

import pytest
import torch

from gradbox_engine.per_sample import BadReduction, jacobian
from gradbox_factors import Block, DenseProjection, Factored, Kind, TwoSided, relative_error
from tests.engine.per_sample import naive
from tests.engine.per_sample.zoo import CASES, build

MATRICES: list[Kind] = ["rademacher", "gaussian"]


@pytest.mark.parametrize("kind", MATRICES)
@pytest.mark.parametrize("name", ["linear over positions", "embedding twice and tied", "lstm"])
def test_a_projection_is_the_rows_times_one_matrix(name: str, kind: Kind) -> None:
    model, inputs = build(name)
    rows = naive.jacobian(model, inputs)
    found = jacobian(model, [inputs], reduce="projection", dim=300, kind=kind).arrays["projection"]
    matrix = DenseProjection(kind, 300)
    expected = torch.zeros(found.shape, dtype=torch.float64)
    for parameter, row in rows.items():
        flat = row.flatten(2)
        index = torch.arange(flat.shape[2])
        blocks = [matrix.entries(parameter, index, a, min(a + 256, 300)) for a in (0, 256)]
        expected += flat @ torch.cat(blocks, 1) / 300**0.5
    assert naive.difference(found, expected) <= naive.TOLERANCE
    factors = jacobian(model, [inputs], form="factored").factors
    assert factors is not None
    assert naive.difference(factors.projection(300, kind=kind), found) <= naive.TOLERANCE


@pytest.mark.parametrize("name", CASES)
def test_a_projection_by_layers_is_each_gradient_between_two_matrices(name: str) -> None:
    model, inputs = build(name)
    rows = naive.jacobian(model, inputs)
    small = TwoSided(3, seed=5)
    answer = jacobian(
        model, [inputs], reduce="projection", dim=3, kind="per_layer", projection_seed=5
    )
    found = answer.arrays["projection"]
    columns = small.columns({name: p.shape for name, p in model.named_parameters()})
    assert list(columns) == list(rows) == list(answer.names)
    for parameter, row in rows.items():
        matrices = row.reshape(*row.shape[:2], row.shape[2] if row.dim() > 2 else 1, -1)
        for side, axis in (("rows", 2), ("columns", 3)):
            matrix = small.matrix(parameter, side, matrices.shape[axis], like=matrices)
            if matrix is not None:
                matrices = torch.tensordot(matrices, matrix, ([axis], [0])).movedim(-1, axis)
        assert (
            naive.difference(found[..., columns[parameter]], matrices.flatten(2)) <= naive.TOLERANCE
        )
    factors = jacobian(model, [inputs], form="factored").factors
    assert factors is not None
    again = factors.projection(3, 5, kind="per_layer")
    assert naive.difference(again, found) <= naive.TOLERANCE


def test_a_projection_by_layers_keeps_what_is_small() -> None:
    numbers = torch.Generator().manual_seed(0)
    x = torch.randn(2, 3, 4, 5, dtype=torch.float64, generator=numbers)
    rows = Factored([{"w": Block("w", (4, 5), x)}])
    assert torch.equal(rows.projection(5, kind="per_layer"), x.flatten(2))


@pytest.mark.parametrize("kind", get_args(Kind))
def test_inner_products_are_as_far_off_as_is_said(kind: Kind) -> None:
    dim, trials = 64, 200
    numbers = torch.Generator().manual_seed(0)
    # Longer than dim on both sides, or nothing is projected by layers.
    left = torch.randn(2, 1, 90, 1, dtype=torch.float64, generator=numbers)
    x = left * torch.randn(70, dtype=torch.float64, generator=numbers)
    rows = Factored([{"w": Block("w", (90, 70), x)}])
    errors = []
    for seed in range(trials):
        first, second = rows.projection(dim, seed, kind=kind)[:, 0]
        exact = x[0].flatten() @ x[1].flatten()
        errors.append((first @ second - exact) / (x[0].norm() * x[1].norm()))
    found = torch.stack(errors)
    assert found.std() <= relative_error(kind, dim)
    assert found.std() >= 0.5 / dim**0.5
    assert found.mean().abs() <= 4 * found.std() / trials**0.5


def test_entries_have_mean_zero_and_variance_one() -> None:
    for kind in MATRICES:
        entries = DenseProjection(kind, 256).entries("w", torch.arange(2000), 0, 256)
        assert entries.mean().abs() < 0.01
        assert (entries.var() - 1).abs() < 0.01
        assert (entries.T @ entries / 2000 - torch.eye(256)).abs().max() < 0.15


def test_a_kind_belongs_to_a_projection() -> None:
    model, inputs = build("linear")
    with pytest.raises(BadReduction, match="kind: expected"):
        jacobian(model, [inputs], reduce="norm", kind="gaussian")
