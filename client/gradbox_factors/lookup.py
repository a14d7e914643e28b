"""Embeddings: J is zero but for the rows that a sample's indices name.

Shapes: B samples, Y outputs, T positions, V vocabulary, D features.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from gradbox_factors.hashing import Sketch
from gradbox_factors.outer import Outer
from gradbox_factors.term import OutputGradients, summed_outputs, wide
from gradbox_factors.two_sided import ROWS, TwoSided


@dataclass(frozen=True, eq=False)
class Lookup(OutputGradients):
    """J[b, y, v] = Σ_t [ids[b, t] = v] left[y, b, t]; rows that no id names are zero."""

    rule: ClassVar[str] = "lookup"
    parameter: str
    shape: tuple[int, ...]
    left: Tensor  # (Y, B, T, D)
    ids: Tensor  # (B, T), int64

    def narrow(self, samples: slice, outputs: slice) -> Lookup:
        return replace(self, left=self.left[outputs, samples], ids=self.ids[samples])

    def rows(self, start: int, stop: int) -> Tensor:
        inside = (self.ids >= start) & (self.ids < stop)
        left = self.left * inside[..., None]
        out = self.left.new_zeros(self.samples, self.outputs, stop - start, self.shape[1])
        ids = (self.ids - start).clamp(0, max(0, stop - start - 1))
        return replace(self, left=left, ids=ids).add_to(out) if stop > start else out

    def write(self, out: Tensor, *, accumulate: bool) -> None:
        self.add_to(out if accumulate else out.zero_())

    def add_to(self, out: Tensor) -> Tensor:
        """Add J to `out` (B, Y, V, D), touching only the rows that the ids name."""
        sample = torch.arange(self.samples, device=self.ids.device)[:, None].expand_as(self.ids)
        for output in range(self.outputs):
            out[:, output].index_put_((sample, self.ids), self.left[output], accumulate=True)
        return out

    def clear(self, out: Tensor) -> None:
        """Zero the rows of `out` (B, Y, V, D) that this term touched."""
        sample = torch.arange(self.samples, device=self.ids.device)[:, None].expand_as(self.ids)
        for output in range(self.outputs):
            out[:, output][sample, self.ids] = 0

    def squared_norm(self) -> Tensor:
        left = wide(self.left)
        same = (self.ids[:, :, None] == self.ids[:, None]).to(left.dtype)
        # A row of J once for each position that names it: squares do not cancel as pairs may.
        rows = torch.matmul(same, left)
        squared: Tensor = (torch.linalg.vecdot(rows, rows) / same.sum(2)).sum(2).T.double()
        return squared

    def pair_bound(self, *, shift: float = 0.0) -> Tensor | None:
        bound: Tensor = torch.linalg.vector_norm(wide(self.left), dim=3).sum(2).square()
        return bound

    def add_gram(self, gram: Tensor, other: Lookup) -> None:
        """Add J J'ᵀ to `gram` (Y, B, Y', B')."""
        same = self.ids.flatten()[:, None] == other.ids.flatten()
        for y in range(self.outputs):
            for z in range(other.outputs):
                pairs = (self.left[y].flatten(0, 1) @ other.left[z].flatten(0, 1).T).mul_(same)
                gram[y, :, z] += self._summed(pairs, other)

    def add_gram_trace(self, gram: Tensor, other: Lookup) -> None:
        """Add Σ_y J_y J'_yᵀ to `gram` (B, B')."""
        same = self.ids.flatten()[:, None] == other.ids.flatten()
        mine = self.left.permute(1, 2, 0, 3).flatten(2).flatten(0, 1)
        pairs = mine @ other.left.permute(1, 2, 0, 3).flatten(2).flatten(0, 1).T
        gram += self._summed(pairs.mul_(same), other)

    def _summed(self, pairs: Tensor, other: Lookup) -> Tensor:
        return pairs.view(*self.ids.shape, *other.ids.shape).sum((1, 3))

    def jvp(self, tangent: Tensor) -> Tensor:
        return (self.left * tangent[self.ids]).flatten(2).sum(2).T

    def vjp(self, cotangent: Tensor) -> Tensor:
        left = summed_outputs(self.left, cotangent)
        return left.new_zeros(self.shape).index_add_(0, self.ids.flatten(), left.flatten(0, 1))

    def sketch(self, sketch: Sketch) -> Tensor:
        spread = sketch.spread(self.left, self.parameter, 1)
        bucket, sign = sketch.axis(self.parameter, 0, self.shape[0], device=spread.device)
        columns = torch.arange(sketch.dim, device=spread.device)
        shifted = (columns - bucket[self.ids][..., None]) % sketch.dim
        moved = spread.gather(3, shifted.expand(self.outputs, *shifted.shape))
        return (moved * sign[self.ids][..., None].to(moved.dtype)).sum(2).transpose(0, 1)

    def two_sided(self, projection: TwoSided) -> Tensor:
        rows = projection.matrix(self.parameter, ROWS, self.shape[0], like=self.left)
        if rows is None:
            return super().two_sided(projection)
        left, sizes = projection.of_columns(self.left, self.parameter), projection.sizes(self.shape)
        return Outer(self.parameter, sizes, left, rows[self.ids], transposed=True).block()
