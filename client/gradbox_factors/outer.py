"""Linear layers: J as a sum of outer products over positions.

Shapes: B samples, Y outputs, T positions, O rows, I columns.
Source: Goodfellow 2015 (norms of one position); Li et al. 2022, arXiv:2110.05679 (over positions).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from gradbox_factors.hashing import Sketch
from gradbox_factors.multiplications import (
    Sizes,
    norm_is_of_pairs,
    sketch_is_of_factors,
    weights_go_right,
)
from gradbox_factors.slabs import cached_bytes
from gradbox_factors.term import (
    OutputGradients,
    Term,
    all_finite,
    nearly_cancelled,
    row_squares,
    summed_outputs,
    wide,
)
from gradbox_factors.two_sided import TwoSided

_PAIR_BYTES = 64 * 2**20
FEWEST_ROWS = 16  # of a slab


@dataclass(frozen=True, eq=False)
class Outer(OutputGradients):
    """J[b, y, o, i] = Σ_t left[y, b, t, o] right[b, t, i], of output gradients and inputs.

    `transposed` says that S is (I, O).
    """

    rule: ClassVar[str] = "outer"
    parameter: str
    shape: tuple[int, ...]
    left: Tensor  # (Y, B, T, O)
    right: Tensor  # (B, T, I)
    transposed: bool = False

    def narrow(self, samples: slice, outputs: slice) -> Outer:
        left, right = self.left[outputs, samples], self.right[samples]
        return Outer(self.parameter, self.shape, left, right, self.transposed)

    def rows(self, start: int, stop: int) -> Tensor:
        sizes = (self.samples, self.outputs, stop - start, *self.shape[1:])
        out = self.left.new_empty(sizes)
        self.write_rows(out, start)
        return out

    def write_rows(self, out: Tensor, start: int) -> None:
        some = slice(start, start + out.shape[2])
        if self.transposed:
            part = replace(self, right=self.right[..., some])
        else:
            part = replace(self, left=self.left[..., some])
        part.write(out, accumulate=False)

    def write(self, out: Tensor, *, accumulate: bool) -> None:
        out = out.view(self.samples, self.outputs, *self._sizes())
        if self.right.shape[1] > 1:
            self._write_product(out, accumulate=accumulate)
            return
        column, row = self.left.permute(1, 0, 3, 2), self.right.unsqueeze(1)
        if self.transposed:
            column, row = row.mT, column.mT
        out.addcmul_(column, row) if accumulate else torch.mul(column, row, out=out)

    def _write_product(self, out: Tensor, *, accumulate: bool) -> None:
        """Write J into `out` (B, Y, *_sizes()) as matrix products over T."""
        if self.transposed and not out.is_contiguous():
            # Some outputs of an array with more: only one sample's matrices are contiguous.
            for b in range(self.samples):
                one = slice(b, b + 1)
                self.narrow(one, slice(None)).write(out[one], accumulate=accumulate)
            return
        first, second = self._matrices()
        flat = out.view(len(first), first.shape[1], second.shape[2])
        flat.baddbmm_(first, second, beta=int(accumulate))

    def _matrices(self) -> tuple[Tensor, Tensor]:
        """The factors as (N, rows, T) and (N, T, columns) of one batched product."""
        Y, B, T, rows = self.left.shape
        if self.transposed:
            right = self.right.mT.expand(Y, *self.right.mT.shape).transpose(0, 1)
            return right.reshape(B * Y, -1, T), self.left.transpose(0, 1).reshape(B * Y, T, rows)
        return self.left.permute(1, 0, 3, 2).reshape(B, Y * rows, T), self.right

    def _sizes(self) -> tuple[int, int]:
        """J's rows and columns: (O, I), or (I, O) where `transposed`."""
        sizes = (self.left.shape[-1], self.right.shape[-1])
        return sizes[::-1] if self.transposed else sizes

    @property
    def sizes(self) -> Sizes:
        """What the multiplications of each way are counted from."""
        Y, B, T, rows = self.left.shape
        return Sizes(Y, B, T, rows, self.right.shape[2])

    @property
    def slab_bytes(self) -> int:
        # Rows cost the same in slabs of any size but thin ones, and less where the cache holds one.
        few = FEWEST_ROWS * self.dense_bytes // max(1, self.num_rows)
        return min(super().slab_bytes, max(few, cached_bytes(self.left.device)))

    def squared_norm(self) -> Tensor:
        if self.right.shape[1] == 1:
            product = row_squares(self.left.select(2, 0)) * row_squares(self.right.select(1, 0))
            return product.T
        if norm_is_of_pairs(self.sizes):
            return self._squared_norm_by_pairs()
        return super().squared_norm()

    def _squared_norm_by_pairs(self) -> Tensor:
        left, right = wide(self.left), wide(self.right)
        products = torch.matmul(left, left.mT).mul_(torch.bmm(right, right.mT))
        sums: Tensor = products.flatten(2).sum(2)
        bound = products.diagonal(dim1=2, dim2=3).sum(2) * products.shape[2]  # Cauchy and Schwarz
        lost = nearly_cancelled(sums, bound)
        squared = sums.T.double()
        if lost.any():
            lost = lost.any(0)
            some = replace(self, left=self.left[:, lost], right=self.right[lost])
            squared[lost] = Term.squared_norm(some)
        return squared

    def pair_bound(self, *, shift: float = 0.0) -> Tensor | None:
        if self.right.shape[1] == 1:
            return None
        lefts = torch.linalg.vector_norm(wide(self.left), dim=3)
        rights = torch.linalg.vector_norm(wide(self.right), dim=2)
        rights = (rights.square() + shift).sqrt() if shift else rights
        bound: Tensor = (lefts * rights).sum(2).square()
        return bound

    def add_gram(self, gram: Tensor, other: Outer, *, shift: float = 0.0) -> None:
        """Add J J'ᵀ to `gram` (Y, B, Y', B') from pairs of positions.

        With `shift` 1 also that of the bias whose factor is `left`.
        """
        T, U = self.right.shape[1], other.right.shape[1]
        lefts_T = other.left.flatten(0, 2).T
        features_T = other.right.flatten(0, 1).T
        for start, stop in self._sample_chunks(other):
            features = self.right[start:stop].flatten(0, 1) @ features_T
            features = (features + shift if shift else features).view(-1, T, 1, other.samples, U)
            for y in range(self.outputs):
                lefts = self.left[y, start:stop].flatten(0, 1) @ lefts_T
                paired = lefts.view(stop - start, T, other.outputs, other.samples, U)
                gram[y, start:stop] += paired.mul_(features).sum((1, 4))

    def add_gram_trace(self, gram: Tensor, other: Outer, *, shift: float = 0.0) -> None:
        """Add Σ_y J_y J'_yᵀ to `gram` (B, B'), as `add_gram` does."""
        T, U = self.right.shape[1], other.right.shape[1]
        lefts_T = other.left.permute(1, 2, 0, 3).flatten(2).flatten(0, 1).T
        features_T = other.right.flatten(0, 1).T
        for start, stop in self._sample_chunks(other):
            left = self.left[:, start:stop].permute(1, 2, 0, 3).flatten(2).flatten(0, 1)
            features = self.right[start:stop].flatten(0, 1) @ features_T
            paired = (left @ lefts_T).mul_(features + shift if shift else features)
            gram[start:stop] += paired.view(stop - start, T, other.samples, U).sum((1, 3))

    def _sample_chunks(self, other: Outer) -> list[tuple[int, int]]:
        a_sample = self.left[:1, :1, :, :1].numel() * other.left[..., :1].numel()
        step = max(1, _PAIR_BYTES // max(1, a_sample * self.dtype.itemsize))
        return [(at, min(at + step, self.samples)) for at in range(0, self.samples, step)]

    def jvp(self, tangent: Tensor) -> Tensor:
        matrix = tangent.reshape(self._sizes())
        image = self.right @ (matrix if self.transposed else matrix.T)
        return self._from_rows_if_overflown((self.left * image).flatten(2).sum(2).T, tangent)

    def vjp(self, cotangent: Tensor) -> Tensor:
        if weights_go_right(self.sizes):
            left, right = self.left[0], self.right * cotangent[:, :, None]
        else:
            left, right = summed_outputs(self.left, cotangent), self.right
        product = left.flatten(0, 1).T @ right.flatten(0, 1)
        return (product.T if self.transposed else product).reshape(self.shape)

    def sketch(self, sketch: Sketch) -> Tensor:
        if not sketch_is_of_factors(self.sizes, sketch.dim):
            return super().sketch(sketch)
        axes = (1, 0) if self.transposed else (0, 1)
        left = torch.fft.rfft(sketch.spread(self.left, self.parameter, axes[0]))
        right = torch.fft.rfft(sketch.spread(self.right, self.parameter, axes[1]))
        projected: Tensor = torch.fft.irfft((left * right).sum(2), n=sketch.dim)
        if not all_finite(projected):
            return super().sketch(sketch)
        return projected.transpose(0, 1)

    def projected_factors(self, projection: TwoSided) -> Outer:
        of_left, of_right = projection.of_rows, projection.of_columns
        if self.transposed:
            of_left, of_right = of_right, of_left
        left, right = of_left(self.left, self.parameter), of_right(self.right, self.parameter)
        return Outer(self.parameter, projection.sizes(self.shape), left, right, self.transposed)
