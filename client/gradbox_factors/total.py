"""Sums of terms of one parameter, and the registry of terms that a sum is read by.

`TERMS` is what a reader of the wire format needs: every rule that a factored result may name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from gradbox_factors.block import Block, Positions, Zero
from gradbox_factors.convolution import Convolution
from gradbox_factors.hashing import Sketch
from gradbox_factors.lookup import Lookup
from gradbox_factors.outer import Outer
from gradbox_factors.term import Term
from gradbox_factors.two_sided import TwoSided


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

    def two_sided(self, projection: TwoSided) -> Tensor:
        return torch.stack([term.two_sided(projection) for term in self.terms]).sum(0)


TERMS: dict[str, type[Term]] = {
    term.rule: term for term in (Outer, Lookup, Positions, Convolution, Block, Zero, Total)
}
