"""Collectors that keep a shard's terms as they are: factors, and the Grams that are made of them.

With rows J' of an earlier job a shard's terms are multiplied with each piece of these and dropped,
so neither side's rows are ever dense, and of this side's factors one shard's are in memory. Sums
over pairs of positions that lose their digits are made anew from rows, a pair of pieces at a time.
Cost: that of a Gram of B + B' samples less the two squares.

Shapes: B samples over all shards and Y outputs of this job, B' and Y' of the other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gradbox_engine.checkpoint import Checkpoint
from gradbox_engine.errors import BadReduction
from gradbox_engine.per_sample.reductions import Collector, Terms
from gradbox_factors import Block, Factored, Positions, Term, packed, unpacked
from gradbox_factors.term import Identity, identity


class KeepFactors(Collector):
    """The factors themselves; `smaller` puts a term's array in its place where that is smaller."""

    def __init__(self, *, smaller: bool = False) -> None:
        self._smaller = smaller
        self._pieces: list[dict[str, Term]] = []

    def whole(self, gradient_bytes: int) -> bool:
        return True

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


class SmallerForm(Collector):
    """The smaller form of each layer where factors are and all of it fits a budget, else the rows.

    Which of the two is known with the first shard: by its bytes a sample, and the samples of all.
    Factors are together in memory until the end; dense rows go to a sink as they are made.
    """

    def __init__(self, dense: Collector, budget_bytes: int, *, samples: int | None = None) -> None:
        """Begin with neither chosen.

        Args:
            dense: takes the rows.
            samples: of all, where they are more than `begin` is told.
        """
        self._dense, self._budget_bytes, self._samples = dense, budget_bytes, samples
        self._chosen: Collector | None = None

    def whole(self, gradient_bytes: int) -> bool:
        if self._chosen is None and gradient_bytes > self._budget_bytes:
            self._choose(self._dense)
        return self._chosen is None or self._chosen.whole(gradient_bytes)

    def take(self, terms: Terms, first_sample: int, outputs: range) -> None:
        if self._chosen is None:
            samples = next(iter(terms.values())).samples
            dense_bytes = sum(term.dense_bytes for term in terms.values())
            kept_bytes = sum(min(t.dense_bytes, t.factor_bytes) for t in terms.values())
            all_samples = self._samples or self._sizes[0]
            fits = kept_bytes * all_samples <= self._budget_bytes * samples
            smaller = kept_bytes < dense_bytes
            self._choose(KeepFactors(smaller=True) if smaller and fits else self._dense)
        assert self._chosen is not None
        self._chosen.take(terms, first_sample, outputs)

    def state(self, samples: int) -> Checkpoint:
        assert self._chosen is not None  # since `take`
        found = self._chosen.state(samples)
        return Checkpoint(found.tensors, {**found.facts, "dense": self._chosen is self._dense})

    def resume(self, found: Checkpoint) -> None:
        self._choose(self._dense if found.facts["dense"] else KeepFactors(smaller=True))
        assert self._chosen is not None
        self._chosen.resume(found)

    def result(self, *, one_output: bool) -> dict[str, Any]:
        assert self._chosen is not None
        return self._chosen.result(one_output=one_output)

    def _choose(self, collector: Collector) -> None:
        collector.begin(*self._sizes)
        self._chosen = collector


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


def narrowed(terms: Terms, parameters: Mapping[str, Tensor]) -> dict[str, Term]:
    """Return the terms in their parameters' dtypes; those that share a factor still do."""
    moved: dict[Identity, Tensor] = {}

    def to(factor: Tensor, dtype: torch.dtype) -> Tensor:
        if not factor.is_floating_point() or factor.dtype == dtype:
            return factor
        return moved.setdefault(identity(factor), factor.to(dtype))

    return {
        name: term.read(
            name,
            term.shape,
            term.geometry(),
            {own: to(factor, parameters[name].dtype) for own, factor in term.tensors().items()},
        )
        for name, term in terms.items()
    }


class CrossGram(Collector):
    """J J'ᵀ, (B, Y, B', Y'), or its trace over outputs, (B, B')."""

    def __init__(self, other: Factored, *, trace: bool) -> None:
        self._other, self._trace = other, trace
        self._parts: list[Tensor] = []

    def whole(self, gradient_bytes: int) -> bool:
        return True

    def begin(self, samples: int, outputs: int) -> None:
        super().begin(samples, outputs)
        if self._trace and outputs != self._other.outputs:
            raise BadReduction(
                f"against: expected rows of {outputs} outputs, to sum over those of both, got "
                f"{self._other.outputs}; take reduce='gram'"
            )

    def take(self, terms: Terms, first_sample: int, outputs: range) -> None:
        self._parts.append(Factored([terms]).gram_with(self._other, trace=self._trace))

    def state(self, samples: int) -> Checkpoint:
        return Checkpoint({"gram": torch.cat(self._parts)})

    def resume(self, found: Checkpoint) -> None:
        self._parts = [found.tensors["gram"]]

    def result(self, *, one_output: bool) -> dict[str, Any]:
        gram = torch.cat(self._parts)
        return {"arrays": {"gram": gram[:, 0, :, 0] if one_output else gram}}


def check_names(names: Sequence[str], other: Factored) -> None:
    """Refuse rows by other parameters than a job's.

    Raises:
        BadReduction: a parameter is missing on one side, or their order differs.
    """
    if tuple(names) != other.names:
        differing = sorted(set(names) ^ set(other.names))[:3] or ["their order"]
        raise BadReduction(
            f"against: expected rows by the same {len(names)} parameters, got rows by "
            f"{len(other.names)}, which differ in {', '.join(differing)}; give both jobs one wrt"
        )
