"""Products of factors where arithmetic is at its limits: shared memory, cancellation, 16 bits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gradbox_engine.per_sample import jacobian, per_sample_gradient
from gradbox_engine.per_sample.request import GradientReduction
from gradbox_factors import (
    Block,
    Factored,
    Lookup,
    Outer,
    Positions,
    Term,
    Total,
    squared_norms,
)
from tests.engine.per_sample import naive

DOUBLE = torch.float64


def made(*sizes: int, seed: int = 0) -> Tensor:
    return torch.randn(sizes, dtype=DOUBLE, generator=torch.Generator().manual_seed(seed))


def whole_rows(factors: Factored) -> Tensor:
    """Return the rows of all parameters side by side, (B, Y, P), float64."""
    return torch.cat([factors.block(name).double().flatten(2) for name in factors.names], 2)


def two_layers_of_one_gradient() -> dict[str, Term]:
    """a(x) + b(xᵀ)ᵀ with as many positions as features: both output gradients lie in one memory.

    Only a has a bias, only b a weight that counts.
    """
    left, right = made(2, 3, 6, 6), made(3, 6, 400, seed=1)
    return {
        "a.bias": Positions("a.bias", (6,), left),
        "b.weight": Outer("b.weight", (6, 400), left.mT, right),
    }


def test_a_gram_tells_transposed_views_of_one_gradient_apart() -> None:
    terms = two_layers_of_one_gradient()
    factors = Factored([terms])
    rows = whole_rows(factors)
    torch.testing.assert_close(factors.gram(), torch.einsum("byp,czp->bycz", rows, rows))
    torch.testing.assert_close(factors.gram(trace=True), torch.einsum("byp,cyp->bc", rows, rows))


def test_transposed_views_of_one_gradient_are_two_factors() -> None:
    factors = Factored([two_layers_of_one_gradient()])
    assert factors.factor_bytes == 8 * (2 * 3 * 6 * 6 * 2 + 3 * 6 * 400)


def centred(B: int = 5, T: int = 4, width: int = 64, *, seed: int = 0) -> Outer:
    """A weight behind which the positions' mean is taken off, of inputs alike at all positions.

    In exact arithmetic its rows are nearly zero: positions cancel to 1e-5 of their size.
    """
    left = made(2, B, T, width, seed=seed)
    left = left - left.mean(2, keepdim=True) + 1e-6
    right = made(B, 1, width, seed=seed + 1).expand(B, T, width)
    return Outer("w", (width, width), left.float(), right.float().contiguous())


def repeated(B: int = 5, T: int = 4, width: int = 64, *, seed: int = 0) -> Lookup:
    """An embedding of one index at all positions, whose mean is taken off behind it."""
    left = made(2, B, T, width, seed=seed)
    left = left - left.mean(2, keepdim=True) + 1e-6
    ids = torch.arange(B)[:, None].expand(B, T) % 2
    return Lookup("w", (3, width), left.float(), ids)


def large(B: int = 5, T: int = 4, width: int = 64) -> Outer:
    """One that does not cancel."""
    left, right = made(2, B, T, width, seed=8), made(B, T, width, seed=9)
    return Outer("w", (width, width), left.float(), right.float())


CANCELLING = [centred, repeated]


@pytest.mark.parametrize("term", CANCELLING)
def test_norms_of_rows_that_nearly_cancel_keep_their_digits(term: Callable[[], Term]) -> None:
    rows = whole_rows(Factored([{"w": term()}]))
    squared = squared_norms({"w": term()})["w"]
    torch.testing.assert_close(squared, rows.square().sum(2), rtol=1e-3, atol=0)


def test_only_samples_that_cancel_are_multiplied_out(monkeypatch: pytest.MonkeyPatch) -> None:
    few, many = centred(1), large(4)
    term = replace(
        many, left=torch.cat([many.left, few.left], 1), right=torch.cat([many.right, few.right])
    )
    rows = whole_rows(Factored([{"w": term}]))
    seen: list[int] = []
    whole = Term.squared_norm
    monkeypatch.setattr(
        Term, "squared_norm", lambda self: (seen.append(self.samples), whole(self))[1]
    )
    squared = term.squared_norm()
    torch.testing.assert_close(squared, rows.square().sum(2), rtol=1e-3, atol=0)
    assert seen == [1]
    many.squared_norm()
    assert seen == [1]


@pytest.mark.parametrize("term", CANCELLING)
@pytest.mark.parametrize("shards", [1, 2])
def test_grams_of_rows_that_nearly_cancel_keep_their_digits(
    term: Callable[..., Term], shards: int
) -> None:
    factors = Factored([{"w": term(seed=2 * seed)} for seed in range(shards)])
    rows = whole_rows(factors)
    expected = torch.einsum("byp,czp->bycz", rows, rows)
    atol = 1e-3 * float(expected.diagonal(dim1=1, dim2=3).diagonal().abs().max())
    torch.testing.assert_close(factors.gram().double(), expected, rtol=0, atol=atol)
    traced = torch.einsum("byp,cyp->bc", rows, rows)
    torch.testing.assert_close(factors.gram(trace=True).double(), traced, rtol=0, atol=2 * atol)


def test_a_gram_of_rows_that_do_not_cancel_is_made_of_pairs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def rows(*_: object, **__: object) -> Tensor:
        raise AssertionError("rows were multiplied out")

    monkeypatch.setattr(Outer, "rows", rows)
    Factored([{"w": large()}]).gram()


def test_a_bias_that_cancels_is_seen_beside_a_small_weight() -> None:
    """The bias' Gram comes with that of its weight, whose inputs are small here."""
    left = centred().left
    weight = Outer("w", (64, 64), left, made(5, 4, 64).float() * 1e-9)
    factors = Factored([{"w": weight, "b": Positions("b", (64,), left)}])
    rows = whole_rows(factors)
    found = factors.gram().double()
    expected = torch.einsum("byp,czp->bycz", rows, rows)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-3 * float(expected.max()))


SIXTEEN_BITS = [torch.float16, torch.bfloat16]


def small(kind: str, dtype: torch.dtype) -> Term:
    """A term whose entries fit into 16 bits; their squares do not fit into float16."""
    left, right = (made(2, 3, 2, 40) * 1e-5).to(dtype), made(3, 2, 50, seed=1).to(dtype)
    if kind == "outer":
        return Outer("w", (40, 50), left, right)
    if kind == "outer of one position":
        return Outer("w", (40, 50), left[:, :, :1].contiguous(), right[:, :1].contiguous())
    if kind == "lookup":
        return Lookup("w", (7, 40), left, torch.tensor([[0, 1], [2, 2], [6, 5]]))
    if kind == "positions":
        return Positions("w", (40,), left)
    return Block("w", (2, 40), left.transpose(0, 1))


KINDS = ["outer", "outer of one position", "lookup", "positions", "block"]


@pytest.mark.parametrize("dtype", SIXTEEN_BITS)
@pytest.mark.parametrize("kind", KINDS)
def test_norms_of_16_bit_rows_do_not_underflow(kind: str, dtype: torch.dtype) -> None:
    term = small(kind, dtype)
    rows = whole_rows(Factored([{"w": term.to(DOUBLE)}]))
    found = Factored([{"w": term}]).norms()
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), rows.norm(dim=2), rtol=1e-3, atol=0)


@pytest.mark.parametrize("dtype", SIXTEEN_BITS)
@pytest.mark.parametrize("kind", KINDS)
def test_reductions_of_16_bit_rows_are_made_in_float32(kind: str, dtype: torch.dtype) -> None:
    term = small(kind, dtype)
    factors = Factored([{"w": term}])
    wide = Factored([{"w": term.to(DOUBLE)}])
    tangent, cotangent = made(*term.shape).to(dtype), made(3, 2)
    for found, expected in [
        (factors.gram(), wide.gram()),
        (factors.gram(trace=True), wide.gram(trace=True)),
        (factors.projection(16), wide.projection(16)),
        (factors.jvp({"w": tangent}), wide.jvp({"w": tangent})),
    ]:
        assert found.dtype == torch.float32
        atol = 1e-5 * float(expected.abs().max())
        torch.testing.assert_close(found.double(), expected, rtol=0, atol=atol)
    pulled = factors.vjp(cotangent)["w"]
    assert pulled.dtype == dtype
    apart = pulled.double() - wide.vjp(cotangent)["w"]
    assert apart.norm() <= 2e-2 * pulled.double().norm()


class TwoDtypes(nn.Module):
    """A layer that no path leads to, then two of different dtypes."""

    def __init__(self, first: torch.dtype, second: torch.dtype) -> None:
        super().__init__()
        self.unused = nn.Linear(3, 3, dtype=first)
        self.a = nn.Linear(5, 4, dtype=first)
        self.b = nn.Linear(4, 3, dtype=second)

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.a(x.to(self.a.weight.dtype)).tanh()
        z: Tensor = self.b(h.to(self.b.weight.dtype))
        return z


@pytest.mark.parametrize(
    ("first", "second", "tolerance"),
    [
        (torch.float32, torch.float64, 1e-5),
        (torch.float64, torch.float32, 1e-5),
        (torch.bfloat16, torch.float32, 5e-2),
        (torch.float32, torch.bfloat16, 5e-2),
    ],
)
def test_parameters_of_two_dtypes_are_reduced_together(
    first: torch.dtype, second: torch.dtype, tolerance: float
) -> None:
    torch.manual_seed(0)
    model, x = TwoDtypes(first, second), torch.randn(6, 5)

    def loss(z: Tensor) -> Tensor:
        return z.square().sum(1)

    dense = per_sample_gradient(model, [{"0": x}], loss).arrays
    rows = torch.cat([array.double().flatten(1) for array in dense.values()], 1)
    norms = rows.norm(dim=1)
    widest = torch.promote_types(torch.promote_types(first, second), torch.float32)

    def reduced(reduce: GradientReduction, **arguments: Any) -> dict[str, Tensor]:
        return per_sample_gradient(model, [{"0": x}], loss, reduce=reduce, **arguments).arrays

    gram = reduced("gram")["gram"]
    assert gram.dtype == widest
    assert naive.difference(gram.double(), rows @ rows.T) < tolerance
    assert naive.difference(reduced("norm")["norm"], norms) < tolerance
    clipped = reduced("clipped_sum", clip=1.0)
    assert all(clipped[name].dtype == dense[name].dtype == p.dtype for name, p in params(model))
    found = torch.cat([array.double().flatten() for array in clipped.values()])
    assert naive.difference(found, (rows / norms[:, None].clamp_min(1)).sum(0)) < tolerance
    projected = reduced("projection", dim=7)["projection"]
    assert projected.dtype == widest
    blocks = {n: Block(n, tuple(a.shape[1:]), a.double()[:, None]) for n, a in dense.items()}
    expected = Factored([blocks]).projection(7)[:, 0]
    assert naive.difference(projected.double(), expected) < tolerance
    tangents = {name: torch.ones_like(p) for name, p in params(model)}
    jvp = jacobian(model, [{"0": x}], reduce="jvp", vectors=tangents).arrays["jvp"]
    assert jvp.dtype == widest


def params(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return list(model.named_parameters())


def test_an_unused_first_parameter_keeps_its_dtype_under_autocast() -> None:
    model = TwoDtypes(torch.float32, torch.float32)
    found = per_sample_gradient(
        model, [{"0": torch.randn(6, 5)}], lambda z: z.square().sum(1), precision="bf16"
    )
    assert {array.dtype for array in found.arrays.values()} == {torch.float32}


@pytest.mark.parametrize("sizes", [(1.0, 1.0), (1.0, 1e-30), (1e-30, 1.0), (1e-22, 1e25)])
@pytest.mark.parametrize("positions", [1, 4])
def test_norms_of_float32_rows_have_their_digits_where_float32_loses_the_squares(
    sizes: tuple[float, float], positions: int
) -> None:
    left, right = made(2, 5, positions, 6) * sizes[0], made(5, positions, 400, seed=1)
    left[:, 2], left[:, 3] = 0, made(2, positions, 6, seed=2) * sizes[1]
    terms: list[Term] = [
        Outer("w", (6, 400), left.float(), right.float()),
        Positions("w", (6,), left.float()),
        Lookup("w", (9, 6), left.float(), torch.arange(5 * positions).view(5, -1) % 7),
        Block("w", (positions, 6), left.float().transpose(0, 1)),
        Block("w", (), left[:, :, 0, 0].float().T),
    ]
    for term in (*terms, Total((terms[0], terms[0]))):
        exact = term.to(DOUBLE).block()[..., None].flatten(2).norm(dim=2)
        found = squared_norms({"w": term})["w"].sqrt()
        torch.testing.assert_close(found, exact, rtol=1e-5, atol=0)


def test_norms_keep_their_digits_where_the_square_of_one_factor_alone_underflows() -> None:
    left, right = made(2, 5, 1, 6) * 1e-22, made(5, 1, 8, seed=1) * 1e15
    term = Outer("w", (6, 8), left.float(), right.float())
    exact = term.to(DOUBLE).block().flatten(2).norm(dim=2)
    for squares in (squared_norms({"w": term})["w"], term.squared_norm()):
        torch.testing.assert_close(squares.sqrt(), exact, rtol=1e-5, atol=0)


def test_a_clipped_sum_keeps_the_part_of_a_float32_row_whose_square_overflows() -> None:
    torch.manual_seed(0)
    net, x = nn.Linear(5, 3), torch.randn(4, 5)
    weight = torch.tensor([1.0, 1e20, 1.0, 1e25])
    found = per_sample_gradient(
        net,
        [{"0": x}],
        lambda z, weight: z.square().sum(1) * weight,
        loss_inputs={"weight": weight},
        reduce="clipped_sum",
        clip=0.5,
    )
    rows = per_sample_gradient(net, [{"0": x}], lambda z: z.square().sum(1)).arrays
    flat = naive.flat(rows, 1)  # all are longer than 0.5
    expected = (0.5 * flat / flat.norm(dim=1, keepdim=True)).sum(0)
    mine = torch.cat([found.arrays[name].flatten() for name in rows])
    torch.testing.assert_close(mine, expected, rtol=1e-4, atol=1e-6)
