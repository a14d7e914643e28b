"""Contributions that are small already: sums over positions, arrays, and sums of terms."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from gradbox_factors.hashing import Sketch
from gradbox_factors.term import Term, wide


@dataclass(frozen=True, eq=False)
class Positions(Term):
    """J[b, y, o] = Σ_t left[y, b, t, o] (or left[y, b, o, t]).

    A bias, which shares its layer's factor.
    """

    rule: ClassVar[str] = "positions"
    parameter: str
    shape: tuple[int, ...]
    left: Tensor  # (Y, B, T, O), or (Y, B, O, T) where `channels_first`
    channels_first: bool = False

    @property
    def samples(self) -> int:
        return self.left.shape[1]

    @property
    def outputs(self) -> int:
        return self.left.shape[0]

    @property
    def dtype(self) -> torch.dtype:
        return self.left.dtype

    def narrow(self, samples: slice, outputs: slice) -> Positions:
        return replace(self, left=self.left[outputs, samples])

    def rows(self, start: int, stop: int) -> Tensor:
        if self.channels_first:
            return self.left[:, :, start:stop].sum(3).transpose(0, 1)
        return self.left[..., start:stop].sum(2).transpose(0, 1)

    def squared_norm(self) -> Tensor:
        axis = 3 if self.channels_first else 2
        one = self.left.shape[axis] == 1
        summed = wide(self.left.select(axis, 0)) if one else wide(self.left).sum(axis)
        squared: Tensor = torch.linalg.vecdot(summed, summed).T.double()
        return squared

    def write(self, out: Tensor, *, accumulate: bool) -> None:
        axis = 3 if self.channels_first else 2
        if accumulate:
            out.add_(self.left.sum(axis).transpose(0, 1))
        elif self.left.shape[axis] == 1:
            out.copy_(self.left.select(axis, 0).transpose(0, 1))
        else:
            torch.sum(self.left.transpose(0, 1), axis, out=out)


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
        return self.empty.sum(2)

    def add_gram(self, gram: Tensor, other: Term) -> None:
        """Add nothing."""

    def add_gram_trace(self, gram: Tensor, other: Term) -> None:
        """Add nothing."""

    def jvp(self, tangent: Tensor) -> Tensor:
        return self.empty.sum(2)

    def vjp(self, cotangent: Tensor) -> Tensor:
        return self.empty.new_zeros(self.shape)

    def sketch(self, sketch: Sketch) -> Tensor:
        return self.empty.new_zeros(self.samples, self.outputs, sketch.dim)


@dataclass(frozen=True, eq=False)
class Total(Term):
    """The sum of several terms of one parameter: tied weights, a layer called twice.

    Norms and Grams of a sum hold cross terms; they are taken from slabs of J.
    """

    rule: ClassVar[str] = "total"
    terms: tuple[Term, ...]

    @property
    def parameter(self) -> str:  # type: ignore[override]
        return self.terms[0].parameter

    @property
    def shape(self) -> tuple[int, ...]:  # type: ignore[override]
        return self.terms[0].shape

    @property
    def samples(self) -> int:
        return self.terms[0].samples

    @property
    def outputs(self) -> int:
        return self.terms[0].outputs

    @property
    def dtype(self) -> torch.dtype:
        return self.terms[0].dtype

    def tensors(self) -> dict[str, Tensor]:
        return {
            f"{index}.{name}": tensor
            for index, term in enumerate(self.terms)
            for name, tensor in term.tensors().items()
        }

    def geometry(self) -> dict[str, Any]:
        return {"terms": [{"rule": term.rule, **term.geometry()} for term in self.terms]}

    @classmethod
    def read(
        cls,
        parameter: str,
        shape: tuple[int, ...],
        geometry: Mapping[str, Any],
        tensors: Mapping[str, Tensor],
    ) -> Self:
        from gradbox_factors.rules import TERMS

        parts = []
        for index, part in enumerate(geometry["terms"]):
            own = {
                name.partition(".")[2]: tensor
                for name, tensor in tensors.items()
                if name.partition(".")[0] == str(index)
            }
            parts.append(TERMS[part["rule"]].read(parameter, shape, part, own))
        return cls(tuple(parts))

    def narrow(self, samples: slice, outputs: slice) -> Total:
        return Total(tuple(term.narrow(samples, outputs) for term in self.terms))

    def rows(self, start: int, stop: int) -> Tensor:
        total = self.terms[0].rows(start, stop)
        for term in self.terms[1:]:
            total = total + term.rows(start, stop)
        return total

    def write(self, out: Tensor, *, accumulate: bool) -> None:
        for index, term in enumerate(self.terms):
            term.write(out, accumulate=accumulate or index > 0)

    def jvp(self, tangent: Tensor) -> Tensor:
        return torch.stack([term.jvp(tangent) for term in self.terms]).sum(0)

    def vjp(self, cotangent: Tensor) -> Tensor:
        return torch.stack([term.vjp(cotangent) for term in self.terms]).sum(0)

    def sketch(self, sketch: Sketch) -> Tensor:
        return torch.stack([term.sketch(sketch) for term in self.terms]).sum(0)
