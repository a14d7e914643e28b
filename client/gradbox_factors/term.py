"""One contribution to one parameter's per-sample Jacobian, kept as factors.

Shapes: B samples, Y outputs (1 for a per-sample gradient), S the parameter's shape, R = S[0] its
rows, P = prod(S). A term stands for an array J of shape (B, Y, *S) that it need not hold. What
every term can do is make rows r0:r1 of J along S[0]; all algebra here follows from that, slab by
slab, and a term overrides what its factors give for less.

Cost of the defaults: the multiplications that make J once, and `SLAB_BYTES` of memory.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import fields
from math import prod
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from gradbox_factors.hashing import Sketch
from gradbox_factors.slabs import SLAB_BYTES, cached_bytes, slabs
from gradbox_factors.two_sided import ROWS, TwoSided

CANCELLED = 2.0**10
"""A sum over pairs is made anew from rows where more of its digits than these may be rounding."""

Identity = tuple[int, torch.Size, tuple[int, ...], torch.dtype]


class Term(ABC):
    """A (B, Y, *shape) array given by factors.

    `parameter` is the name the array belongs to and `shape` that parameter's shape. A term is a
    dataclass of these, of factors and of flags; one that has anything else says how to read it.
    """

    rule: ClassVar[str]
    parameter: str
    shape: tuple[int, ...]

    @property
    @abstractmethod
    def samples(self) -> int:
        """B."""

    @property
    @abstractmethod
    def outputs(self) -> int:
        """Y."""

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype:
        """The dtype of the array."""

    def tensors(self) -> dict[str, Tensor]:
        """Return the factors by the names that the wire format gives them."""
        return {name: getattr(self, name) for name in self._names(of_factors=True)}

    def geometry(self) -> dict[str, Any]:
        """Return what else is needed to read the factors, as JSON values."""
        return {name: getattr(self, name) for name in self._names(of_factors=False)}

    @classmethod
    def read(
        cls,
        parameter: str,
        shape: tuple[int, ...],
        geometry: Mapping[str, Any],
        tensors: Mapping[str, Tensor],
    ) -> Self:
        """Build the term that `tensors()` and `geometry()` describe."""
        factors = {name: tensors[name] for name in cls._names(of_factors=True)}
        flags = {name: bool(geometry[name]) for name in cls._names(of_factors=False)}
        return cls(parameter=parameter, shape=shape, **factors, **flags)  # type: ignore[call-arg]

    @classmethod
    def _names(cls, *, of_factors: bool) -> list[str]:
        """Return the names of a dataclass's fields that are tensors, or flags."""
        wanted = "Tensor" if of_factors else "bool"
        return [field.name for field in fields(cls) if field.type == wanted]  # type: ignore[arg-type]

    @abstractmethod
    def narrow(self, samples: slice, outputs: slice) -> Term:
        """Return the term of some samples and outputs; a view where the factors allow one."""

    @abstractmethod
    def rows(self, start: int, stop: int) -> Tensor:
        """Return J[:, :, start:stop], (B, Y, stop - start, *S[1:]), or (B, Y, 1) for S = ()."""

    def write_rows(self, out: Tensor, start: int) -> None:
        """Write the rows from `start` on into contiguous `out` (B, Y, n, *S[1:])."""
        out.copy_(self.rows(start, start + out.shape[2]))

    def to(self, dtype: torch.dtype) -> Term:
        """Return the term with its factors in `dtype`, itself where it is of that dtype."""
        if self.dtype == dtype:
            return self
        moved = {
            name: x.to(dtype) if x.is_floating_point() else x for name, x in self.tensors().items()
        }
        return self.read(self.parameter, self.shape, self.geometry(), moved)

    def on(self, device: torch.device) -> Term:
        """Return the term with its factors on a device, itself where they are there."""
        if all(x.device == device for x in self.tensors().values()):
            return self
        moved = {name: x.to(device) for name, x in self.tensors().items()}
        return self.read(self.parameter, self.shape, self.geometry(), moved)

    def widened(self) -> Term:
        """Return the term in float32 or wider: sums of products of 16-bit numbers underflow."""
        return self.to(torch.promote_types(self.dtype, torch.float32))

    def write(self, out: Tensor, *, accumulate: bool) -> None:
        """Write J into `out` (B, Y, *S), or add it there."""
        block = self.rows(0, self.num_rows).view(out.shape)
        out.add_(block) if accumulate else out.copy_(block)

    def block(self) -> Tensor:
        """Return J, shape (B, Y, *S)."""
        return self.rows(0, self.num_rows).view(self.samples, self.outputs, *self.shape)

    @property
    def num_rows(self) -> int:
        """R, 1 for a 0-dim parameter."""
        return self.shape[0] if self.shape else 1

    @property
    def dense_bytes(self) -> int:
        """The size of J."""
        return self.samples * self.outputs * prod(self.shape) * self.dtype.itemsize

    @property
    def factor_bytes(self) -> int:
        """The size of the factors."""
        return sum(factor.nbytes for factor in self.tensors().values())

    @property
    def slab_bytes(self) -> int:
        """How large a slab of rows may be."""
        return SLAB_BYTES

    def slabs(self) -> Iterator[tuple[int, int]]:
        """Cut the rows into slabs."""
        return slabs(self.num_rows, self.dense_bytes, self.slab_bytes)

    def squared_norm(self) -> Tensor:
        """Return Σ_p J[b, y, p]², shape (B, Y), float64 between slabs."""
        total = _zeros(self, self.samples, self.outputs)
        for start, stop in self.slabs():
            slab = wide(self.rows(start, stop)).flatten(2)
            total += slab.square().sum(2)
        return total

    def pair_bound(self, *, shift: float = 0.0) -> Tensor | None:
        """Return what Σ_p J[b, y, p]² may be where nothing cancels, shape (Y, B).

        None where a Gram sums no pairs of positions, and so keeps its digits. `shift` is that of
        `Outer.add_gram`.
        """
        return None

    def jvp(self, tangent: Tensor) -> Tensor:
        """Return Σ_p J[b, y, p] v[p], shape (B, Y), for `tangent` of shape S."""
        total = self.rows(0, 0).new_zeros(self.samples, self.outputs)
        tangent_R = tangent.reshape(self.num_rows, prod(self.shape[1:]))
        for start, stop in self.slabs():
            total += self.rows(start, stop).flatten(2) @ tangent_R[start:stop].flatten()
        return total

    def _from_rows_if_overflown(self, product: Tensor, tangent: Tensor) -> Tensor:
        """Return J v, which is `product` unless an input of the layer overflowed in it.

        A mask's -1e308 times v is infinite, and NaN next to its output gradient, which is zero.
        """
        return product if all_finite(product) else Term.jvp(self, tangent)

    def vjp(self, cotangent: Tensor) -> Tensor:
        """Return Σ_{b,y} u[b, y] J[b, y], shape S, for `cotangent` of shape (B, Y)."""
        flat = cotangent.reshape(-1)
        parts = [
            flat @ self.rows(start, stop).flatten(2).flatten(0, 1) for start, stop in self.slabs()
        ]
        return (parts[0] if len(parts) == 1 else torch.cat(parts)).view(self.shape)

    def sketch(self, sketch: Sketch) -> Tensor:
        """Return the projection of J to `sketch.dim` numbers, shape (B, Y, dim)."""
        total = self.rows(0, 0).new_zeros(self.samples, self.outputs, sketch.dim)
        columns = prod(self.shape[1:])
        for start, stop in self.slabs():
            bucket, sign = sketch.grid(self.parameter, start, stop, columns, device=total.device)
            slab = self.rows(start, stop).flatten(2)
            total.index_add_(2, bucket.flatten(), slab * sign.flatten().to(slab.dtype))
        return total

    def projected_factors(self, projection: TwoSided) -> Term | None:
        """Return Qᵀ J P as an `Outer`, of projected factors; None where J has no such factors."""
        return None

    def two_sided(self, projection: TwoSided) -> Tensor:
        """Return Qᵀ J P of J's rows and columns, shape (B, Y, r, c)."""
        factors = self.projected_factors(projection)
        if factors is not None and all_finite(projected := factors.block()):
            return projected
        r, c = projection.sizes(self.shape)
        total = self.rows(0, 0).new_zeros(self.samples, self.outputs, r, c)
        of_rows = projection.matrix(self.parameter, ROWS, self.num_rows, like=total)
        for start, stop in self.slabs():
            slab = self.rows(start, stop).reshape(self.samples, self.outputs, stop - start, -1)
            slab = projection.of_columns(slab, self.parameter)
            if of_rows is None:
                total[:, :, start:stop] = slab
            else:
                total += (slab.mT @ of_rows[start:stop]).mT  # the other way: one product a sample
        return total


class OutputGradients(Term):
    """A term whose first factor are output gradients: `left`, of shape (Y, B, ...)."""

    left: Tensor

    @property
    def samples(self) -> int:
        return self.left.shape[1]

    @property
    def outputs(self) -> int:
        return self.left.shape[0]

    @property
    def dtype(self) -> torch.dtype:
        return self.left.dtype


def summed_outputs(left: Tensor, cotangent: Tensor) -> Tensor:
    """Return Σ_y u[b, y] left[y, b, t, o], shape (B, T, O)."""
    Y, B, T, rows = left.shape
    if B == 1:
        return (cotangent @ left.reshape(Y, T * rows)).view(1, T, rows)
    by_sample = left.transpose(0, 1).reshape(B, Y, T * rows)
    return torch.bmm(cotangent.unsqueeze(1), by_sample).view(B, T, rows)


def identity(factor: Tensor) -> Identity:
    """Return what tells one factor from another.

    Views of one tensor begin at one address: transposed ones of a square tensor differ in strides
    alone.
    """
    return factor.data_ptr(), factor.shape, factor.stride(), factor.dtype


def all_finite(x: Tensor) -> bool:
    """Return whether no number is infinite or NaN; their sum tells at once where it is finite."""
    return bool(x.sum().isfinite()) or bool(x.isfinite().all())


def wide(x: Tensor) -> Tensor:
    """Return `x` in float32 where its dtype has 16 bits, whose squares underflow."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def row_squares(x: Tensor) -> Tensor:
    """Return the sum of squares along the last dim in float64."""
    flat, parts = x.flatten(0, -2), []
    for start, stop in slabs(len(flat), 8 * flat.numel(), cached_bytes(x.device)):
        doubles = flat[start:stop].double()
        parts.append(torch.linalg.vecdot(doubles, doubles))
    return torch.cat(parts).view(x.shape[:-1])


def nearly_cancelled(squared: Tensor, bound: Tensor) -> Tensor:
    """Return where too little is left of a squared norm that was summed over pairs of positions.

    Positions that nearly cancel leave rounding, of either sign, of the size of `bound`: the sum
    without cancellation, or more. Where a factor overflowed next to a zero, the sum is NaN.
    """
    return ~(squared >= CANCELLED * torch.finfo(squared.dtype).eps * bound)


def _zeros(term: Term, *shape: int) -> Tensor:
    device = next(iter(term.tensors().values())).device
    dtype = torch.float32 if device.type == "mps" else torch.float64
    return torch.zeros(shape, dtype=dtype, device=device)
