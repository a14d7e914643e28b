"""Which sample each row of a tensor belongs to, where data decide it: experts, tokens left out.

A row of an output gradient belongs to one sample where samples do not meet. With the samples'
losses weighted by powers of two, row r's gradient is that without weights times its sample's, and
no digit is rounded: so the quotient of the two names the sample. A row without a gradient adds
nothing to any sample and is left out. Rows that hold several samples' numbers get a wrong one,
which the comparison of all rows shows: it is made on every shard of a plan that uses this.

Cost: one backward pass to these outputs for each 32 samples, or part, in the base of 32.

Shapes: B samples, Y outputs, R rows of a tensor, T the most rows of a sample.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_WEIGHTS = {torch.float16: 4}  # how many different ones its range has room for
_MOST_WEIGHTS = 32


@dataclass(frozen=True)
class RowOwners:
    """The rows of every sample, in the order in which the tensor has them."""

    rows: Tensor  # (B, T)
    real: Tensor  # (B, T), false where a sample has fewer rows

    def lead(self, x: Tensor, offset: int = 0) -> Tensor:
        """Return `x` with (B, T) in place of dim `offset`, zero where there is no row."""
        taken = x.index_select(offset, self.rows.flatten())
        led = taken.view(*x.shape[:offset], *self.rows.shape, *x.shape[offset + 1 :])
        real = self.real.view(*self.real.shape, *[1] * (x.dim() - offset - 1))
        return led.masked_fill(~real, 0)


def row_owners(
    gradients: Sequence[Tensor], weighted: Callable[[Tensor], Sequence[Tensor]], samples: int
) -> list[RowOwners | None]:
    """Return the owners of each tensor's rows, None where no row has a gradient.

    Args:
        gradients: of the sum of all samples' values, (R, ...) each.
        weighted: gives the same of the sum with weights (B,).
    """
    base = min(_WEIGHTS.get(g.dtype, _MOST_WEIGHTS) for g in gradients)
    sizes = [_largest(g) for g in gradients]
    owners = [torch.zeros_like(size) for size in sizes]
    place = 1
    while place < samples:
        digits_B = torch.arange(samples, device=sizes[0].device) // place % base
        for owner, size, g in zip(owners, sizes, weighted(digits_B.exp2()), strict=True):
            owner += (_largest(g) / size).log2().round() * place
        place *= base
    return [
        _rows_of(owner.where(size > 0, -1), samples)
        for owner, size in zip(owners, sizes, strict=True)
    ]


def _largest(g: Tensor) -> Tensor:
    return g.reshape(g.shape[0], -1).abs().amax(1).double() if g.numel() else g.new_zeros(0)


def _rows_of(owner_R: Tensor, samples: int) -> RowOwners | None:
    known = (owner_R >= 0) & (owner_R < samples)
    owner, (rows,) = owner_R[known].long(), known.nonzero(as_tuple=True)
    if not len(rows):
        return None
    owner, order = owner.sort(stable=True)
    counts = owner.bincount(minlength=samples)
    nth = torch.arange(len(rows), device=rows.device) - (counts.cumsum(0) - counts)[owner]
    rows_BT = rows.new_zeros(samples, int(counts.max()))
    real_BT = torch.zeros_like(rows_BT, dtype=torch.bool)
    rows_BT[owner, nth], real_BT[owner, nth] = rows[order], True
    return RowOwners(rows_BT, real_BT)
