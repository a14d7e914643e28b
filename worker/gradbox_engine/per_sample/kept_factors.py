"""Collectors that keep a shard's terms as they are: factors, and the Gram that is made of them all.

Shapes: B samples over all shards, Y outputs.
"""

from __future__ import annotations

from typing import Any

from gradbox_engine.checkpoint import Checkpoint
from gradbox_engine.per_sample.reductions import Collector, Terms
from gradbox_factors import Block, Factored, Positions, Term, packed, unpacked
from gradbox_factors.term import Identity, identity


class KeepFactors(Collector):
    """The factors themselves; `smaller` puts a term's array in its place where that is smaller."""

    whole = True

    def __init__(self, *, smaller: bool = False) -> None:
        self._smaller = smaller
        self._pieces: list[dict[str, Term]] = []

    def take(self, terms: Terms, first_sample: int, outputs: range) -> None:
        self._pieces.append(smaller_forms(terms) if self._smaller else dict(terms))

    def state(self, samples: int) -> Checkpoint:
        tensors, described = packed(self._pieces)
        return Checkpoint(tensors, {"pieces": described})

    def resume(self, found: Checkpoint) -> None:
        self._pieces = unpacked(found.tensors, found.facts["pieces"])

    def factors(self) -> Factored:
        """Return what was kept so far."""
        return Factored(self._pieces)

    def result(self, *, one_output: bool) -> dict[str, Any]:
        return {"arrays": {}, "factors": self.factors()}


class Gram(KeepFactors):
    """J Jᵀ, (B, Y, B, Y), or its trace over outputs, (B, B)."""

    def __init__(self, *, trace: bool) -> None:
        super().__init__()
        self._trace = trace

    def result(self, *, one_output: bool) -> dict[str, Any]:
        gram = Factored(self._pieces).gram(trace=self._trace)
        return {"arrays": {"gram": gram[:, 0, :, 0] if one_output else gram}}


def smaller_forms(terms: Terms) -> dict[str, Term]:
    """Return the terms, those as arrays whose array is smaller than their factors."""
    chosen: dict[str, Term] = {}
    kept: set[Identity] = set()
    for name, term in sorted(terms.items(), key=lambda item: isinstance(item[1], Positions)):
        shared = isinstance(term, Positions) and identity(term.left) in kept
        if not shared and term.dense_bytes <= term.factor_bytes and not isinstance(term, Block):
            chosen[name] = Block(name, term.shape, term.block())
        else:
            chosen[name] = term
            kept.update(identity(factor) for factor in term.tensors().values())
    return {name: chosen[name] for name in terms}
