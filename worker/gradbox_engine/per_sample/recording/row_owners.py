"""Which sample each row of a tensor belongs to, where data decide it: experts, tokens left out.

A row of an output gradient belongs to one sample where samples do not meet. With the samples'
losses weighted by powers of two, row r's gradient is that without weights times its sample's, and
no digit is rounded: so the quotient of the two names the sample. A row without a gradient adds
nothing to any sample and is left out. Rows that hold several samples' numbers get a wrong one,
which the comparison of all rows shows: it is made on every shard of a plan that uses this.

A row that is not finite, and has no finite entry but zeros, tells no sample. It goes to the sample
whose value is not finite. Where several are such, each gets one of these rows; where none is, each
sample does.

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
    """The rows of every sample, in the order in which the tensor has them; lost ones last."""

    rows: Tensor  # (B, T)
    real: Tensor  # (B, T), false where a sample has fewer rows

    def lead(self, x: Tensor, offset: int = 0) -> Tensor:
        """Return `x` with (B, T) in place of dim `offset`, zero where there is no row."""
        taken = x.index_select(offset, self.rows.flatten())
        led = taken.view(*x.shape[:offset], *self.rows.shape, *x.shape[offset + 1 :])
        real = self.real.view(*self.real.shape, *[1] * (x.dim() - offset - 1))
        return led.masked_fill(~real, 0)


def row_owners(
    gradients: Sequence[Tensor],
    weighted: Callable[[Tensor], Sequence[Tensor]],
    suspects_B: Tensor,
) -> list[RowOwners | None]:
    """Return the owners of each tensor's rows, None where no row has a gradient.

    Args:
        gradients: of the sum of all samples' values, (R, ...) each.
        weighted: gives the same of the sum with weights (B,).
        suspects_B: whether a sample's value is not finite, bool.
    """
    samples, finite = len(suspects_B), [_by_row(g).isfinite() for g in gradients]
    base = min(_WEIGHTS.get(g.dtype, _MOST_WEIGHTS) for g in gradients)
    sizes = [_largest(g, entries) for g, entries in zip(gradients, finite, strict=True)]
    owners = [torch.zeros_like(size) for size in sizes]
    place = 1
    while place < samples:
        digits_B = torch.arange(samples, device=sizes[0].device) // place % base
        found = zip(owners, sizes, weighted(digits_B.exp2()), finite, strict=True)
        for owner, size, g, entries in found:
            owner += (_largest(g, entries) / size).log2().round() * place
        place *= base
    return [
        _rows_of(owner.where(size > 0, -1), ~entries.all(1), suspects_B)
        for owner, size, entries in zip(owners, sizes, finite, strict=True)
    ]


def _by_row(g: Tensor) -> Tensor:
    return g.unsqueeze(-1).flatten(1)


def _largest(g: Tensor, entries: Tensor) -> Tensor:
    """Return the largest size in each row among some of its entries."""
    if not g.numel():
        return g.new_zeros(0)
    return _by_row(g).abs().masked_fill(~entries, 0.0).amax(1).double()


def _rows_of(owner_R: Tensor, lost_R: Tensor, suspects_B: Tensor) -> RowOwners | None:
    samples = len(suspects_B)
    known = (owner_R >= 0) & (owner_R < samples)
    owner, (rows,) = owner_R[known].long(), known.nonzero(as_tuple=True)
    (lost,) = (lost_R & ~known).nonzero(as_tuple=True)
    if len(lost):
        (suspects,) = (suspects_B if suspects_B.any() else ~suspects_B).nonzero(as_tuple=True)
        lost = lost if len(suspects) == 1 else lost[:1]
        owner = torch.cat([owner, suspects.repeat_interleave(len(lost))])
        rows = torch.cat([rows, lost.repeat(len(suspects))])
    if not len(rows):
        return None
    owner, order = owner.sort(stable=True)
    counts = owner.bincount(minlength=samples)
    nth = torch.arange(len(rows), device=rows.device) - (counts.cumsum(0) - counts)[owner]
    rows_BT = rows.new_zeros(samples, int(counts.max()))
    real_BT = torch.zeros_like(rows_BT, dtype=torch.bool)
    rows_BT[owner, nth], real_BT[owner, nth] = rows[order], True
    return RowOwners(rows_BT, real_BT)
