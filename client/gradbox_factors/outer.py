"""Linear layers: J as a sum of outer products over positions.

Shapes: B samples, Y outputs, T positions, O rows, I columns.
Source: Goodfellow 2015 (norms of one position); Li et al. 2022, arXiv:2110.05679 (over positions).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from gradbox_factors.hashing import Sketch
from gradbox_factors.term import Term, nearly_cancelled, summed_outputs, wide

_PAIR_BYTES = 64 * 2**20


@dataclass(frozen=True, eq=False)
class Outer(Term):
    """J[b, y, o, i] = Σ_t left[y, b, t, o] right[b, t, i], of output gradients and inputs.

    `transposed` says that S is (I, O).
    """

    rule: ClassVar[str] = "outer"
    parameter: str
    shape: tuple[int, ...]
    left: Tensor  # (Y, B, T, O)
    right: Tensor  # (B, T, I)
    transposed: bool = False

    @property
    def samples(self) -> int:
        return self.right.shape[0]

    @property
    def outputs(self) -> int:
        return self.left.shape[0]

    @property
    def dtype(self) -> torch.dtype:
        return self.left.dtype

    def narrow(self, samples: slice, outputs: slice) -> Outer:
        left, right = self.left[outputs, samples], self.right[samples]
        return Outer(self.parameter, self.shape, left, right, self.transposed)

    def rows(self, start: int, stop: int) -> Tensor:
        if self.transposed:
            part = replace(self, right=self.right[..., start:stop])
        else:
            part = replace(self, left=self.left[..., start:stop])
        sizes = part._sizes()
        out = self.left.new_empty(self.samples, self.outputs, *sizes)
        part.write(out, accumulate=False)
        return out.view(self.samples, self.outputs, stop - start, *self.shape[1:])

    def _sizes(self) -> tuple[int, int]:
        sizes = (self.left.shape[-1], self.right.shape[-1])
        return sizes[::-1] if self.transposed else sizes

    def write(self, out: Tensor, *, accumulate: bool) -> None:
        sizes = self._sizes()
        if out.shape[2:] != sizes:
            out = out.view(self.samples, self.outputs, *sizes)
        if self.right.shape[1] == 1 and not (self.left.is_cpu and _rows_are_short(sizes)):
            right = self.right.unsqueeze(1)
            if self.transposed:
                pair = right.mT, self.left.transpose(0, 1)
            else:
                pair = self.left.permute(1, 0, 3, 2), right
            out.addcmul_(*pair) if accumulate else torch.mul(*pair, out=out)
            return
        self._write_product(out, accumulate=accumulate)

    def _write_product(self, out: Tensor, *, accumulate: bool) -> None:
        """Write J into `out` (B, Y, rows, columns) as matrix products."""
        if self.transposed and not out.is_contiguous():
            # Some outputs of an array with more: only one sample's matrices are contiguous.
            for b in range(self.samples):
                one = slice(b, b + 1)
                self.narrow(one, slice(None)).write(out[one], accumulate=accumulate)
            return
        first, second = self._matrices()
        # Transposed: BLAS is faster so when T = 1.
        flat_T = out.view(first.shape[0], first.shape[1], second.shape[2]).mT
        if accumulate:
            flat_T.baddbmm_(second.mT, first.mT)
        elif self.left.is_cpu and self.right.shape[1] > 1 and _fits_the_cache(flat_T):
            for n, each in enumerate(flat_T):
                # Filled memory is in the cache when the product is stored there.
                each.mT.zero_()
                torch.mm(second[n].mT, first[n].mT, out=each)
        else:
            torch.bmm(second.mT, first.mT, out=flat_T)

    def _matrices(self) -> tuple[Tensor, Tensor]:
        """The factors as (N, rows, T) and (N, T, columns) of one batched product."""
        Y, B, T, rows = self.left.shape
        if self.transposed:
            right = self.right.mT.expand(Y, *self.right.mT.shape).transpose(0, 1)
            return right.reshape(B * Y, -1, T), self.left.transpose(0, 1).reshape(B * Y, T, rows)
        return self.left.permute(1, 0, 3, 2).reshape(B, Y * rows, T), self.right

    def squared_norm(self) -> Tensor:
        Y, B, T, rows = self.left.shape
        columns = self.right.shape[2]
        if T == 1:
            left, right = self.left.flatten(0, 2).double(), self.right.select(1, 0).double()
            lefts = torch.linalg.vecdot(left, left).view(Y, B)
            product: Tensor = lefts * torch.linalg.vecdot(right, right)
            return product.T
        if T * (columns + Y * rows) < columns * Y * rows:
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
        if self.right.shape[1] == 1 or not self.pairs_are_cheaper(self):
            return None
        lefts = torch.linalg.vector_norm(wide(self.left), dim=3)
        rights = torch.linalg.vector_norm(wide(self.right), dim=2)
        rights = (rights.square() + shift).sqrt() if shift else rights
        bound: Tensor = (lefts * rights).sum(2).square()
        return bound

    def add_gram(self, gram: Tensor, other: Term) -> None:
        self.add_gram_with(gram, other, shift=0.0)

    def add_gram_with(self, gram: Tensor, other: Term, *, shift: float) -> None:
        """Add J J'ᵀ, and with `shift` 1 also that of the bias whose factor is `left`."""
        if not isinstance(other, Outer) or not self.pairs_are_cheaper(other):
            return super().add_gram(gram, other)
        T, U = self.right.shape[1], other.right.shape[1]
        if T == U == 1:
            gram += gram_of_one_position([(self, other, shift)])
            return None
        lefts_T = other.left.flatten(0, 2).T
        features_T = other.right.flatten(0, 1).T
        for start, stop in self._sample_chunks(other):
            features = self.right[start:stop].flatten(0, 1) @ features_T
            features = (features + shift if shift else features).view(-1, T, 1, other.samples, U)
            for y in range(self.outputs):
                lefts = self.left[y, start:stop].flatten(0, 1) @ lefts_T
                paired = lefts.view(stop - start, T, other.outputs, other.samples, U)
                gram[y, start:stop] += paired.mul_(features).sum((1, 4))
        return None

    def add_gram_trace(self, gram: Tensor, other: Term) -> None:
        self.add_gram_trace_with(gram, other, shift=0.0)

    def add_gram_trace_with(self, gram: Tensor, other: Term, *, shift: float) -> None:
        """Add Σ_y J_y J'_yᵀ, and with `shift` 1 also that of the bias whose factor is `left`."""
        if not isinstance(other, Outer) or not self.pairs_are_cheaper(other):
            return super().add_gram_trace(gram, other)
        T, U = self.right.shape[1], other.right.shape[1]
        lefts_T = other.left.permute(1, 2, 0, 3).flatten(2).flatten(0, 1).T
        features_T = other.right.flatten(0, 1).T
        for start, stop in self._sample_chunks(other):
            left = self.left[:, start:stop].permute(1, 2, 0, 3).flatten(2).flatten(0, 1)
            features = self.right[start:stop].flatten(0, 1) @ features_T
            paired = (left @ lefts_T).mul_(features + shift if shift else features)
            gram[start:stop] += paired.view(stop - start, T, other.samples, U).sum((1, 3))
        return None

    def pairs_are_cheaper(self, other: Outer) -> bool:
        """Compare products over pairs of positions with products over parameters."""
        Y, B, T, rows = self.left.shape
        columns, C, U = self.right.shape[2], other.samples, other.right.shape[1]
        if self.transposed != other.transposed:
            return False
        pairs = B * T * C * U * (columns + Y * other.outputs * rows)
        dense = (B * T * Y + C * U * other.outputs + B * Y * C * other.outputs) * rows * columns
        return pairs < dense

    def _sample_chunks(self, other: Outer) -> list[tuple[int, int]]:
        a_sample = self.left[:1, :1, :, :1].numel() * other.left[..., :1].numel()
        step = max(1, _PAIR_BYTES // max(1, a_sample * self.dtype.itemsize))
        return [(at, min(at + step, self.samples)) for at in range(0, self.samples, step)]

    def jvp(self, tangent: Tensor) -> Tensor:
        matrix = tangent.reshape(self._sizes())
        image = self.right @ (matrix if self.transposed else matrix.T)
        return self._from_rows_if_overflown((self.left * image).flatten(2).sum(2).T, tangent)

    def vjp(self, cotangent: Tensor) -> Tensor:
        left = summed_outputs(self.left, cotangent)
        product = left.flatten(0, 1).T @ self.right.flatten(0, 1)
        return (product.T if self.transposed else product).reshape(self.shape)

    def sketch(self, sketch: Sketch) -> Tensor:
        axes = (1, 0) if self.transposed else (0, 1)
        left = torch.fft.rfft(sketch.spread(self.left, self.parameter, axes[0]))
        right = torch.fft.rfft(sketch.spread(self.right, self.parameter, axes[1]))
        projected: Tensor = torch.fft.irfft((left * right).sum(2), n=sketch.dim)
        if not projected.isfinite().all():
            return super().sketch(sketch)
        return projected.transpose(0, 1)


def _rows_are_short(sizes: tuple[int, int]) -> bool:
    """Whether a product of BLAS writes an outer product faster than a broadcast does.

    A broadcast restarts its inner loop at every row, which halves its speed on 300 numbers.
    """
    rows, columns = sizes
    return rows >= 64 and 64 <= columns <= 512


def _fits_the_cache(arrays: Tensor) -> bool:
    """Whether one of several arrays is not tiny, and still in the cache after it is filled."""
    return len(arrays) > 1 and 2**18 <= arrays[0].nbytes <= 2**22


def gram_of_one_position(pairs: Sequence[tuple[Outer, Outer, float]]) -> Tensor:
    """Return the sum of the Grams of several layers with T = 1, (Y, B, Y', B').

    Output by output through all layers, so that each slice of the result stays in the cache. Each
    pair has its `shift`, see `add_gram_with`.
    """
    first, second, _ = pairs[0]
    sizes = (first.outputs, first.samples, second.outputs, second.samples)
    gram = first.left.new_empty(sizes)
    varying: list[tuple[Tensor, Tensor, Tensor]] = []
    constant: list[tuple[Tensor, Tensor, Tensor]] = []
    for mine, other, shift in pairs:
        feature = mine.right.select(1, 0) @ other.right.select(1, 0).T
        if shift:
            feature.add_(shift)
        both_constant = _is_constant(mine.left) and (other is mine or _is_constant(other.left))
        (constant if both_constant else varying).append((mine.left, other.left, feature))
    if varying:
        _write_slices(gram, varying)
    else:
        gram.zero_()
    for left, right, feature in constant:
        weights = left[:, 0, 0] @ right[:, 0, 0].T
        for y, z in weights.nonzero().tolist():
            gram[y, :, z].add_(feature, alpha=float(weights[y, z]))
    return gram


def _write_slices(gram: Tensor, layers: Sequence[tuple[Tensor, Tensor, Tensor]]) -> None:
    """Write Σ (left · right) ∘ feature of all layers to `gram`, one slice y after another.

    Args:
        layers: left (Y, B, 1, O), right (Y', B', 1, O) and feature (B, B') of each.
    """
    B = gram.shape[1]
    transposed_rights = [right.flatten(0, 2).T for _, right, _ in layers]
    features = [feature[:, None] for _, _, feature in layers]
    lefts = [left.select(2, 0) for left, _, _ in layers]
    scratch = gram.new_empty(gram.shape[1:]) if len(layers) > 1 else gram[0]
    for y, slice_y in enumerate(gram):
        torch.mm(lefts[0][y], transposed_rights[0], out=slice_y.view(B, -1))
        slice_y.mul_(features[0])
        for left, right, feature in zip(
            lefts[1:], transposed_rights[1:], features[1:], strict=True
        ):
            torch.mm(left[y], right, out=scratch.view(B, -1))
            slice_y.addcmul_(scratch, feature)


def _is_constant(left: Tensor) -> bool:
    """Whether all samples have the same output gradients, as at z itself: the cotangents.

    A network that ends in a linear layer has them there, and a Gram then needs Y · Y' numbers of
    that layer instead of a product over all pairs of rows.
    """
    one = left[:, :1]
    return torch.equal(one, left[:, -1:]) and torch.equal(left, one.expand_as(left))
