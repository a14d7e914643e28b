"""Seeded projections by a matrix of independent entries: random signs, or normal numbers.

Entry (p, k) belongs to number p of a parameter, read row by row, and to output k. It comes from a
hash of (seed, parameter, p, k) in wrapping 64-bit integers, so it depends on no shard, chunk or
device; normal numbers agree between devices to rounding. With entries of variance 1/dim,

    E⟨Sx, Sy⟩ = ⟨x, y⟩,   Var⟨Sx, Sy⟩ ≤ (‖x‖²‖y‖² + ⟨x, y⟩²)/dim ≤ 2‖x‖²‖y‖²/dim.

Cost: rows multiplied out, a slab at a time, and dim multiplications a number: no use is made of
factors, so `Sketch` is cheaper by about dim. Rows of a parameter that are zero throughout, as those
of an embedding that no token names, cost nothing.

Source: Achlioptas 2003, "Database-friendly random projections" (signs); Park et al. 2023, "TRAK"
(their use on gradients); Box and Muller 1958 (normal numbers).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import pi
from typing import Literal

import torch
from torch import Tensor

from gradbox_factors.hashing import SIGNS_A_WORD, Sketch, hash_key, mixed, shifted, signs_of, step
from gradbox_factors.sums import common_dtype, total_of
from gradbox_factors.term import Term
from gradbox_factors.two_sided import TwoSided

Kind = Literal["sketch", "rademacher", "gaussian", "per_layer"]

# dim · Var⟨Sx, Sy⟩ / (‖x‖²‖y‖²) is at most this. A sketch of rows and columns: Avron, Nguyen and
# Woodruff 2014, "Subspace embeddings for the polynomial kernel", lemma 1 with q = 2.
VARIANCE: dict[Kind, float] = {
    "sketch": 11.0,
    "rademacher": 2.0,
    "gaussian": 2.0,
    "per_layer": 8.0,
}

NORMALS_A_WORD = 2
BLOCK = 256  # outputs of one block of the matrix; a multiple of what a word holds
MATRIX_NUMBERS = 2**22


@dataclass(frozen=True)
class DenseProjection:
    """The projection to `dim` numbers by a matrix that `seed` names."""

    kind: Kind
    dim: int
    seed: int = 0

    def entries(self, parameter: str, index: Tensor, first: int, last: int) -> Tensor:
        """Return the entries of numbers `index` (n,) and outputs first:last, float64.

        `first` is a multiple of `BLOCK`. Not yet divided by √dim.
        """
        each = SIGNS_A_WORD if self.kind == "rademacher" else NORMALS_A_WORD
        words = torch.arange(first // each, -(-last // each), device=index.device)
        of_number = mixed(step(index) + hash_key(self.seed, parameter, self.kind))
        bits = mixed(of_number[:, None] + step(words + 1))
        found = signs_of(bits).double() if self.kind == "rademacher" else _normals(bits).flatten(1)
        return found[:, : last - first]


Projection = Sketch | DenseProjection | TwoSided


def projection_of(kind: Kind, dim: int, seed: int) -> Projection:
    """Return the projection of a kind."""
    if kind == "per_layer":
        return TwoSided(dim, seed)
    return Sketch(dim, seed) if kind == "sketch" else DenseProjection(kind, dim, seed)


def projected_rows(
    terms: Mapping[str, Term], projection: Projection, names: Sequence[str]
) -> Tensor:
    """Return the projection of the rows of all parameters, (B, Y, K), K = dim but for "per_layer".

    Args:
        names: the order of the parameters.
    """
    wide, dtype = (terms[name].widened() for name in names), common_dtype(terms)
    if isinstance(projection, TwoSided):
        return torch.cat([term.two_sided(projection).flatten(2).to(dtype) for term in wide], 2)
    return total_of((projected(term, projection) for term in wide), dtype)


def relative_error(kind: Kind, dim: int) -> float:
    """Return a bound on the standard deviation of ⟨Sx, Sy⟩ / (‖x‖‖y‖) over seeds."""
    return float((VARIANCE[kind] / dim) ** 0.5)


def projected(term: Term, projection: Sketch | DenseProjection) -> Tensor:
    """Return the projection of a term's rows, shape (B, Y, dim)."""
    if isinstance(projection, Sketch):
        return term.sketch(projection)
    total = term.rows(0, 0).new_zeros(term.samples * term.outputs, projection.dim)
    for start, stop in term.slabs():
        slab = term.rows(start, stop).flatten(0, 1)
        if slab.numel() == 0:
            continue
        slab = slab.reshape(len(slab), stop - start, -1)
        rows = slab.ne(0).any(0).any(-1).nonzero().flatten()
        columns = slab.shape[2]
        at_once = max(1, MATRIX_NUMBERS // (columns * BLOCK))
        for first_row in range(0, len(rows), at_once):
            some = rows[first_row : first_row + at_once]
            index = (start + some)[:, None] * columns + torch.arange(columns, device=some.device)
            part = slab[:, some].flatten(1)
            for first in range(0, projection.dim, BLOCK):
                last = min(first + BLOCK, projection.dim)
                matrix = projection.entries(term.parameter, index.flatten(), first, last)
                total[:, first:last] += part @ matrix.to(part.dtype)
    scaled: Tensor = total / projection.dim**0.5
    return scaled.view(term.samples, term.outputs, projection.dim)


def _normals(bits: Tensor) -> Tensor:
    """Return two normal numbers from the halves of each word, (..., NORMALS_A_WORD)."""
    radius = ((shifted(bits, 32).double() + 0.5) / 2**32).log().mul(-2).sqrt()
    angle = (bits & (2**32 - 1)).double() * (2 * pi / 2**32)
    return torch.stack([radius * angle.cos(), radius * angle.sin()], -1)
