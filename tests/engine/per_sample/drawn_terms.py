"""Rows of random parameters as factors, in any layout of memory, beside the arrays they stand for.

Shapes: B samples, Y outputs, T positions. Some positions cancel, some samples are alike, a bias may
share the factor of its weight.
"""

from __future__ import annotations

import random

import torch
import torch.nn.functional as F
from torch import Tensor

from gradbox_factors import (
    Block,
    Convolution,
    Factored,
    Geometry,
    Lookup,
    Outer,
    Positions,
    Term,
    Total,
    Zero,
)

DOUBLE = torch.float64
KINDS = ("linear", "convolution", "lookup", "block", "zero", "total")


def dense(term: Term) -> Tensor:
    """Return the array that a term stands for by its definition, (B, Y, *shape), float64."""
    match term:
        case Total():
            return torch.stack([dense(part) for part in term.terms]).sum(0)
        case Outer():
            rows = torch.einsum("ybto,bti->byoi", term.left, term.right)
            return (rows.mT if term.transposed else rows).reshape(-1, term.outputs, *term.shape)
        case Positions():
            return term.left.sum(3 if term.channels_first else 2).transpose(0, 1)
        case Lookup():
            named = F.one_hot(term.ids, term.shape[0]).to(DOUBLE)
            return torch.einsum("ybtd,btv->byvd", term.left, named)
        case Convolution():
            return _dense_convolution(term)
        case Block():
            return term.array
    return torch.zeros(term.samples, term.outputs, *term.shape, dtype=DOUBLE)


def _dense_convolution(term: Convolution) -> Tensor:
    window, rows = term.window, torch.zeros(term.samples, term.outputs, *term.shape, dtype=DOUBLE)
    weight = torch.zeros(term.shape, dtype=DOUBLE, requires_grad=True)
    function = F.conv_transpose1d if window.transposed else F.conv1d
    for b in range(term.samples):
        given = {"stride": window.stride, "padding": window.padding, "dilation": window.dilation}
        image = function(term.right[b], weight, groups=window.groups, **given)  # type: ignore[operator]
        for y in range(term.outputs):
            (rows[b, y],) = torch.autograd.grad(image, weight, term.left[y, b], retain_graph=True)
    return rows


class DrawnRows:
    """The terms of some parameters over one to three shards: `factors`, and `rows` by name."""

    def __init__(self, seed: int) -> None:
        self._of = random.Random(seed)
        self._numbers = torch.Generator().manual_seed(seed)
        self._outputs = self._of.choice([1, 1, 2, 4])
        self._kinds = [self._of.choice(KINDS) for _ in range(self._of.randint(1, 4))]
        self._sizes = [[self._of.randint(1, 6) for _ in range(4)] for _ in self._kinds]
        self._flags = [self._of.random() < 0.3 for _ in self._kinds]
        self.factors = self.more(self._of.randint(1, 3))
        self.rows = rows_of(self.factors)

    def more(self, num_shards: int) -> Factored:
        """Return rows of the same parameters for more shards."""
        return Factored([self._piece(self._of.randint(1, 4)) for _ in range(num_shards)])

    def tensor(self, *sizes: int) -> Tensor:
        """Draw numbers, often in another layout than that of their dims."""
        x = torch.randn(sizes, dtype=DOUBLE, generator=self._numbers)
        dims = list(range(x.dim()))
        if self._of.random() < 0.3:
            self._of.shuffle(dims)
        x = x.permute(dims).contiguous().permute([dims.index(dim) for dim in range(x.dim())])
        return torch.stack([x, -x], -1)[..., 0] if self._of.random() < 0.1 else x

    def _left(self, B: int, T: int, size: int) -> Tensor:
        left = self.tensor(self._outputs, B, T, size)
        if T > 1 and self._of.random() < 0.2:
            left[:, :, 1] = 1e-6 * left[:, :, 1] - left[:, :, 0]
        return left[:, :1].expand_as(left) if self._of.random() < 0.1 else left

    def _piece(self, B: int) -> dict[str, Term]:
        terms: list[Term] = []
        for place, kind in enumerate(self._kinds):
            terms += getattr(self, f"_{kind}")(B, f"p{place}", self._sizes[place], place)
        return {term.parameter: term for term in terms}

    def _linear(self, B: int, name: str, sizes: list[int], place: int) -> list[Term]:
        rows, columns, T = 4 * sizes[0], 9 * sizes[1], self._of.choice([1, 1, 2, 5])
        left, right = self._left(B, T, rows), self.tensor(B, T, columns)
        swapped = self._flags[place]
        shape = (columns, rows) if swapped else (rows, columns)
        last = self._of.random() < 0.5
        bias = Positions(f"{name}.bias", (rows,), left if last else left.mT, not last)
        return [Outer(name, shape, left, right, swapped), bias]

    def _convolution(self, B: int, name: str, sizes: list[int], place: int) -> list[Term]:
        groups, swapped, steps = 1 + sizes[0] % 2, self._flags[place], 1 + sizes[1] % 2
        inner, outer, size = groups * sizes[2], groups * sizes[3], 5 + sizes[1]
        window = Geometry((3,), (steps,), (1,), (1,), groups, swapped)
        right = self.tensor(B, 1, inner, size)
        out = (size - 1) * steps + 1 if swapped else (size - 1) // steps + 1
        shape = (inner, outer // groups, 3) if swapped else (outer, inner // groups, 3)
        left = self.tensor(self._outputs, B, 1, outer, out)
        bias = Positions(f"{name}.bias", (outer,), left[:, :, 0], channels_first=True)
        return [Convolution(name, shape, left, right, window), bias]

    def _lookup(self, B: int, name: str, sizes: list[int], place: int) -> list[Term]:
        ids = torch.randint(0, sizes[0], (B, sizes[2]), generator=self._numbers)
        left = self._left(B, sizes[2], sizes[1])
        return [Lookup(name, (sizes[0], sizes[1]), left, ids)]

    def _block(self, B: int, name: str, sizes: list[int], place: int) -> list[Term]:
        shape = tuple(sizes[: sizes[3] % 3])
        return [Block(name, shape, self.tensor(B, self._outputs, *shape))]

    def _zero(self, B: int, name: str, sizes: list[int], place: int) -> list[Term]:
        return [Zero(name, tuple(sizes[:2]), self.tensor(B, self._outputs, 0))]

    def _total(self, B: int, name: str, sizes: list[int], place: int) -> list[Term]:
        (first,) = self._lookup(B, name, sizes, place)
        left, right = self._left(B, 2, sizes[0]), self.tensor(B, 2, sizes[1])
        return [Total((first, Outer(name, first.shape, left, right)))]


def rows_of(factors: Factored) -> dict[str, Tensor]:
    """Return the rows of every parameter, (B, Y, P of it)."""
    return {
        name: torch.cat(
            [dense(piece[name]).flatten(2 if piece[name].shape else 1) for piece in factors.pieces]
        ).view(factors.samples, factors.outputs, -1)
        for name in factors.names
    }
