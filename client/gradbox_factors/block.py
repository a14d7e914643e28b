"""Contributions that are small already: sums over positions, arrays, and sums of terms."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from gradbox_factors.hashing import Sketch
from gradbox_factors.term import OutputGradients, Term, row_squares, wide
from gradbox_factors.two_sided import TwoSided


@dataclass(frozen=True, eq=False)
class Positions(OutputGradients):
    """J[b, y, o] = Σ_t left[y, b, t, o] (or left[y, b, o, t]).

    A bias, which shares its layer's factor.
    """

    rule: ClassVar[str] = "positions"
    parameter: str
    shape: tuple[int, ...]
    left: Tensor  # (Y, B, T, O), or (Y, B, O, T) where `channels_first`
    channels_first: bool = False

    def narrow(self, samples: slice, outputs: slice) -> Positions:
        left = self.left[outputs, samples]
        return Positions(self.parameter, self.shape, left, self.channels_first)

    def rows(self, start: int, stop: int) -> Tensor:
        if self.channels_first:
            return self.left[:, :, start:stop].sum(3).transpose(0, 1)
        return self.left[..., start:stop].sum(2).transpose(0, 1)

    def vjp(self, cotangent: Tensor) -> Tensor:
        summed = self._summed(self.left)
        return (cotangent.T.reshape(-1) @ summed.flatten(0, 1)).view(self.shape)

    def squared_norm(self) -> Tensor:
        return row_squares(self._summed(wide(self.left))).T

    def write(self, out: Tensor, *, accumulate: bool) -> None:
        if accumulate:
            out.add_(self._summed(self.left).transpose(0, 1))
        else:
            torch.sum(self.left.transpose(0, 1), self._axis, out=out)

    def two_sided(self, projection: TwoSided) -> Tensor:
        rows = projection.of_rows(self._summed(self.left), self.parameter)
        return rows.transpose(0, 1).unsqueeze(3)

    @property
    def _axis(self) -> int:
        """The dim of `left` that counts positions."""
        return 3 if self.channels_first else 2

    def _summed(self, left: Tensor) -> Tensor:
        """Return the sum of `left` over positions, (Y, B, O); a view where there is one."""
        one = left.shape[self._axis] == 1
        return left.select(self._axis, 0) if one else left.sum(self._axis)


@dataclass(frozen=True, eq=False)
class Block(Term):
    """J itself."""

    rule: ClassVar[str] = "block"
    parameter: str
    shape: tuple[int, ...]
    array: Tensor  # (B, Y, *shape)

    @property
    def samples(self) -> int:
        return self.array.shape[0]

    @property
    def outputs(self) -> int:
        return self.array.shape[1]

    @property
    def dtype(self) -> torch.dtype:
        return self.array.dtype

    def narrow(self, samples: slice, outputs: slice) -> Block:
        return replace(self, array=self.array[samples, outputs])

    def rows(self, start: int, stop: int) -> Tensor:
        if not self.shape:
            return self.array[..., None][..., start:stop]
        return self.array[:, :, start:stop]


@dataclass(frozen=True, eq=False)
class Zero(Term):
    """J = 0: a parameter that no path leads to."""

    rule: ClassVar[str] = "zero"
    parameter: str
    shape: tuple[int, ...]
    empty: Tensor  # (B, Y, 0)

    @property
    def samples(self) -> int:
        return self.empty.shape[0]

    @property
    def outputs(self) -> int:
        return self.empty.shape[1]

    @property
    def dtype(self) -> torch.dtype:
        return self.empty.dtype

    def narrow(self, samples: slice, outputs: slice) -> Zero:
        return replace(self, empty=self.empty[samples, outputs])

    def rows(self, start: int, stop: int) -> Tensor:
        sizes = (self.samples, self.outputs, stop - start, *self.shape[1:])
        return self.empty.new_zeros(sizes)

    def write(self, out: Tensor, *, accumulate: bool) -> None:
        if not accumulate:
            out.zero_()

    def squared_norm(self) -> Tensor:
        return self.empty.double().sum(2)

    def jvp(self, tangent: Tensor) -> Tensor:
        return self.empty.sum(2)

    def vjp(self, cotangent: Tensor) -> Tensor:
        return self.empty.new_zeros(self.shape)

    def sketch(self, sketch: Sketch) -> Tensor:
        return self.empty.new_zeros(self.samples, self.outputs, sketch.dim)
