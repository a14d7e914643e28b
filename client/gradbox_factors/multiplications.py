"""Which of two ways to a number of a linear layer's rows is taken: the one that multiplies less.

A row J[b, y] = Σ_t left[y, b, t] ⊗ right[b, t] has O × I numbers, from T positions. One side of a
Gram has N = B·T positions over all its samples, the other N'. A sketch has d numbers.

    squared norm   pairs    T² (I + Y·O) a sample
                   rows     T · Y·O·I
    Gram           pairs    N·N' (I + Y·Y'·O)
                   rows     (N·Y + N'·Y' + B·Y·B'·Y') O·I, and N'·Y' = 0 with themselves
    sketch         factors  T (I + Y·O + 2·Y·d) + (T + T·Y + Y) d log₂ d a sample
                   rows     (T + 1) Y·O·I
    weighted sum   weights  Y·N·O on the output gradients, or N·I on the inputs where Y = 1

A Gram goes one way for all pieces, since the rows of each are made once for all others. At T = 64
and O = 50,000 a norm is 205 M from pairs and 102 M from rows where I = 32, 206 M and 819 M where
I = 256. The Gram of 16 such samples is 52 G from pairs, and 2 G or 16 G from rows.

Shapes: Y outputs, B samples, T positions, O rows, I columns.
Doubt: a multiplication of an FFT takes longer than one of a matrix product.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import log2


@dataclass(frozen=True)
class Sizes:
    """The sizes of a linear layer's factors."""

    outputs: int
    samples: int
    positions: int
    rows: int
    columns: int


def norm_is_of_pairs(x: Sizes) -> bool:
    """Whether squared norms are summed over pairs of positions."""
    numbers = x.outputs * x.rows
    return x.positions * (x.columns + numbers) < numbers * x.columns


def gram_is_of_pairs(mine: Sequence[Sizes], theirs: Sequence[Sizes] | None) -> bool:
    """Whether a Gram is summed over pairs of positions.

    Args:
        mine: of every piece.
        theirs: the same of the other side; None for rows with themselves.
    """
    x, y = mine[0], (theirs or mine)[0]
    samples, others = (sum(one.samples for one in side) for side in (mine, theirs or mine))
    positions, other_positions = (
        sum(one.samples * one.positions for one in side) for side in (mine, theirs or mine)
    )
    pairs = positions * other_positions * (x.columns + x.outputs * y.outputs * x.rows)
    made = positions * x.outputs + (other_positions * y.outputs if theirs else 0)
    products = samples * x.outputs * others * y.outputs
    return pairs < (made + products) * x.rows * x.columns


def sketch_is_of_factors(x: Sizes, dim: int) -> bool:
    """Whether rows are sketched as convolutions of their factors' sketches."""
    spread = x.positions * (x.columns + x.outputs * (x.rows + 2 * dim))
    transforms = x.positions * (1 + x.outputs) + x.outputs
    dense = (x.positions + 1) * x.outputs * x.rows * x.columns
    return spread + transforms * dim * log2(dim) < dense


def weights_go_right(x: Sizes) -> bool:
    """Whether a weighted sum of rows weights the inputs, in place of the output gradients."""
    return x.outputs == 1 and x.columns < x.rows
