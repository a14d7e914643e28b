"""A seeded projection of each parameter by itself, of the rows and of the columns of its matrix.

A parameter of shape (R, ...) is read as a matrix G of R rows and C columns, and becomes Qᵀ G P of
r = min(dim, R) rows and c = min(dim, C) columns. A side that has at most `dim` entries stays as it
is. Entries of Q and P are random signs over √r and √c, which a hash draws, of (seed, parameter,
side, index), so that any machine computes them alike. Q is that of the parameter's module: a bias
stays a column of its layer's matrix. With them

    E⟨QᵀGP, QᵀHP⟩ = ⟨G, H⟩,   Var ≤ (4/dim + 4/dim²) ‖G‖²‖H‖².

The projections of all parameters lie beside each other in one row, in the order in which they are
given: what acts on the two sides of one layer, as curvature by Kronecker factors does, can act on
what is kept of it. An outer product is projected by its factors, and never formed.

Source: Choe et al. 2024, "What is your data worth to GPT?", arXiv:2405.13954 (LoGra).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate
from math import prod
from typing import Any

import torch
from torch import Tensor

from gradbox_factors.hashing import hash_key, mixed, random_signs, step

ROWS, COLUMNS = "rows", "columns"


@dataclass(frozen=True)
class TwoSided:
    """The projection of each parameter to at most `dim` rows and columns that `seed` names."""

    dim: int
    seed: int = 0
    _matrices: dict[tuple[Any, ...], Tensor] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def sizes(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """Return r and c of a parameter of some shape."""
        rows, columns = (shape[0] if shape else 1), prod(shape[1:])
        return min(self.dim, rows), min(self.dim, columns)

    def columns(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, slice]:
        """Return which numbers of a row belong to which parameter."""
        return column_slices({name: prod(self.sizes(shape)) for name, shape in shapes.items()})

    def matrix(self, parameter: str, side: str, size: int, *, like: Tensor) -> Tensor | None:
        """Return Q or P, (size, r or c), in the dtype of `like`; None where that side stays."""
        if size <= self.dim:
            return None
        drawn_for = parameter.rpartition(".")[0] if side == ROWS else parameter
        key = drawn_for, side, size, like.device, like.dtype
        if key not in self._matrices:
            signs = _signs(self.dim, self.seed, drawn_for, side, size, like.device)
            self._matrices[key] = signs.to(like.dtype).div_(self.dim**0.5)
        return self._matrices[key]

    def of_rows(self, x: Tensor, parameter: str) -> Tensor:
        """Return x Q for x (..., R)."""
        return _times(x, self.matrix(parameter, ROWS, x.shape[-1], like=x))

    def of_columns(self, x: Tensor, parameter: str) -> Tensor:
        """Return x P for x (..., C)."""
        return _times(x, self.matrix(parameter, COLUMNS, x.shape[-1], like=x))


def column_slices(columns: Mapping[str, int]) -> dict[str, slice]:
    """Return which numbers of a row belong to which parameter, by how many each has."""
    ends = accumulate(columns.values())
    return {n: slice(e - size, e) for (n, size), e in zip(columns.items(), ends, strict=True)}


def _times(x: Tensor, matrix: Tensor | None) -> Tensor:
    return x if matrix is None else x @ matrix


@lru_cache(maxsize=256)
def _signs(
    dim: int, seed: int, drawn_for: str, side: str, size: int, device: torch.device
) -> Tensor:
    index = torch.arange(size, device=device)
    return random_signs(mixed(step(index) + hash_key(seed, drawn_for, side)), dim).to(torch.int8)
