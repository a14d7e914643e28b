"""What is done with a shard's terms: written densely, kept as factors, or reduced.

A collector takes the terms of one shard after the other, in chunks of outputs where it can; its
`result` are fields of `SampleResult`. Between two shards its `state` is what another process goes
on from; rows that a sink took are not in it.

With rows J' of an earlier job a shard's terms are multiplied with each piece of these and dropped,
so neither side's rows are ever dense, and of this side's factors one shard's are in memory. Sums
over pairs of positions that lose their digits are made anew from rows, a pair of pieces at a time.
Cost: that of a Gram of B + B' samples less the two squares.

Shapes: B samples over all shards, b of one, Y outputs; B' and Y' of the other job.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gradbox_engine.checkpoint import Checkpoint
from gradbox_engine.errors import BadReduction
from gradbox_engine.model.precision import accumulation_dtype
from gradbox_engine.per_sample.pieces import Pieces, Sink
from gradbox_factors import (
    Block,
    Factored,
    Positions,
    Projection,
    Term,
    packed,
    projected_rows,
    squared_norms,
    unpacked,
)
from gradbox_factors.factored import summed_rows
from gradbox_factors.sums import common_dtype, total_of
from gradbox_factors.term import Identity, identity

Terms = Mapping[str, Term]


class Collector(ABC):
    """Takes terms."""

    def whole(self, gradient_bytes: int) -> bool:
        """Whether it needs all outputs of a shard at once, whose gradients take so many bytes."""
        return False

    def begin(self, samples: int, outputs: int) -> None:
        """Told B and Y before the first terms."""
        self._sizes = (samples, outputs)

    @abstractmethod
    def take(self, terms: Terms, first_sample: int, outputs: range) -> None:
        """Take a shard's terms of some outputs."""

    @abstractmethod
    def state(self, samples: int) -> Checkpoint:
        """Return what was collected of so many samples, for another process."""

    @abstractmethod
    def resume(self, found: Checkpoint) -> None:
        """Go on from a `state` of another process; `begin` was called."""

    @abstractmethod
    def result(self, *, one_output: bool) -> dict[str, Any]:
        """Return what was collected, without the dim of outputs where there is `one_output`."""

    def _rows(self, term: Term, first_sample: int, outputs: range) -> tuple[slice, slice]:
        samples = slice(first_sample, first_sample + term.samples)
        return samples, slice(outputs.start, outputs.stop)

    def _with_room(self, rows: Tensor) -> Tensor:
        """Return the rows of the first samples with room for those of all."""
        whole = rows.new_zeros((*self._sizes, *rows.shape[2:]))
        whole[: len(rows)] = rows
        return whole


class ToArrays(Collector):
    """Dense arrays in memory."""

    def __init__(self) -> None:
        self._arrays: dict[str, Tensor] = {}

    def take(self, terms: Terms, first_sample: int, outputs: range) -> None:
        if not self._arrays:
            self._arrays = {
                name: torch.empty((*self._sizes, *x.shape), dtype=x.dtype, device=_device(terms))
                for name, x in terms.items()
            }
        for name, term in terms.items():
            out = self._arrays[name]
            if (term.samples, term.outputs) != self._sizes:
                out = out[self._rows(term, first_sample, outputs)]
            term.write(out, accumulate=False)

    def state(self, samples: int) -> Checkpoint:
        return Checkpoint({name: array[:samples] for name, array in self._arrays.items()})

    def resume(self, found: Checkpoint) -> None:
        self._arrays = {name: self._with_room(rows) for name, rows in found.tensors.items()}

    def result(self, *, one_output: bool) -> dict[str, Any]:
        return {"arrays": {n: x.squeeze(1) if one_output else x for n, x in self._arrays.items()}}


class ToSink(Collector):
    """Dense arrays written to a sink piece by piece."""

    def __init__(self, sink: Sink, budget_bytes: int) -> None:
        self._sink, self._pieces = sink, Pieces(budget_bytes)
        self._empty: dict[str, Tensor] = {}  # name → (0, 0, *shape), once the sink was told

    def take(self, terms: Terms, first_sample: int, outputs: range) -> None:
        if not self._empty:
            self._begin({n: torch.empty((0, 0, *t.shape), dtype=t.dtype) for n, t in terms.items()})
        for term in terms.values():
            self._pieces.send(term, self._sink, first_sample, outputs.start)

    def state(self, samples: int) -> Checkpoint:
        return Checkpoint(self._empty)  # the sink has the rows

    def resume(self, found: Checkpoint) -> None:
        self._begin(found.tensors)

    def _begin(self, empty: Mapping[str, Tensor]) -> None:
        self._empty = dict(empty)
        shapes = {name: (*self._sizes, *x.shape[2:]) for name, x in empty.items()}
        self._sink.begin(shapes, {name: x.dtype for name, x in empty.items()})

    def result(self, *, one_output: bool) -> dict[str, Any]:
        return {"arrays": {}}


class _ByRow(Collector):
    """Numbers of every row by name, (B, Y, ...)."""

    def __init__(self) -> None:
        self._numbers: dict[str, Tensor] = {}

    @abstractmethod
    def _numbers_of(self, terms: Terms) -> Mapping[str, Tensor]:
        """Return those of some terms, (b, y, ...)."""

    def take(self, terms: Terms, first_sample: int, outputs: range) -> None:
        term = next(iter(terms.values()))
        for name, numbers in self._numbers_of(terms).items():
            if numbers.shape[:2] == self._sizes:
                self._numbers[name] = numbers
                continue
            if name not in self._numbers:
                self._numbers[name] = numbers.new_zeros((*self._sizes, *numbers.shape[2:]))
            self._numbers[name][self._rows(term, first_sample, outputs)] = numbers

    def state(self, samples: int) -> Checkpoint:
        return Checkpoint({name: numbers[:samples] for name, numbers in self._numbers.items()})

    def resume(self, found: Checkpoint) -> None:
        self._numbers = {name: self._with_room(rows) for name, rows in found.tensors.items()}

    def result(self, *, one_output: bool) -> dict[str, Any]:
        numbers = self._numbers
        return {"arrays": {n: x.squeeze(1) if one_output else x for n, x in numbers.items()}}


class Norms(_ByRow):
    """Norms over all parameters and by parameter, (B, Y)."""

    def _numbers_of(self, terms: Terms) -> Mapping[str, Tensor]:
        return squared_norms(terms)

    def result(self, *, one_output: bool) -> dict[str, Any]:
        squares: dict[str, Tensor] = super().result(one_output=one_output)["arrays"]
        total = torch.stack(list(squares.values())).sum(0).sqrt()
        norms = {name: squared.sqrt() for name, squared in squares.items()}
        return {"arrays": {"norm": total}, "parameter_norms": norms}


class Projected(_ByRow):
    """A seeded random projection of all parameters, (B, Y, K)."""

    def __init__(self, projection: Projection, names: Sequence[str]) -> None:
        super().__init__()
        self._projection, self._names = projection, names

    def _numbers_of(self, terms: Terms) -> Mapping[str, Tensor]:
        return {"projection": projected_rows(terms, self._projection, self._names)}


class Directional(_ByRow):
    """J v, summed over parameters, (B, Y)."""

    def __init__(self, tangents: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._tangents = tangents

    def _numbers_of(self, terms: Terms) -> Mapping[str, Tensor]:
        wide = {name: terms[name].widened() for name in self._tangents}
        parts = (
            term.jvp(self._tangents[name].to(_device({name: term}), term.dtype))
            for name, term in wide.items()
        )
        return {"jvp": total_of(parts, common_dtype(terms))}


def tangents_of(vectors: Any, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tangents by name, on the devices of their parameters, in their dtypes or wider.

    Raises:
        BadReduction: one has no parameter, or another shape.
    """
    if not isinstance(vectors, Mapping) or not vectors:
        raise BadReduction(
            f"vectors: expected a tangent by parameter name, got {type(vectors).__name__}"
        )
    tangents = {}
    for name, tangent in vectors.items():
        parameter = parameters.get(name)
        if parameter is None or not isinstance(tangent, Tensor) or tangent.shape != parameter.shape:
            expected = tuple(parameter.shape) if parameter is not None else "no such parameter"
            got = tuple(tangent.shape) if isinstance(tangent, Tensor) else type(tangent).__name__
            raise BadReduction(f"vectors[{name!r}]: expected {expected}, got {got}")
        wide = accumulation_dtype(parameter.dtype)  # float16 has no tangent below 6e-8
        tangents[name] = tangent.to(parameter.device, wide)
    return tangents


class SampleSums(Collector):
    """Sums over samples by name, made in float32 or wider; a parameter's end in its dtype."""

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        self._parameters = parameters
        self._totals: dict[str, Tensor] = {}

    def add(self, parts: Mapping[str, Tensor]) -> None:
        """Add a shard's."""
        for name, own in parts.items():
            part = own.to(accumulation_dtype(own.dtype))
            self._totals[name] = self._totals[name] + part if name in self._totals else part

    def state(self, samples: int) -> Checkpoint:
        return Checkpoint(self._totals)

    def resume(self, found: Checkpoint) -> None:
        self._totals = dict(found.tensors)

    def result(self, *, one_output: bool) -> dict[str, Any]:
        dtypes = {name: parameter.dtype for name, parameter in self._parameters.items()}
        return {"arrays": {n: x.to(dtypes.get(n, x.dtype)) for n, x in self._totals.items()}}


class ClippedSum(SampleSums):
    """Σ_b g_b · min(1, clip/‖g_b‖) by parameter."""

    def __init__(self, clip: float, parameters: Mapping[str, Tensor]) -> None:
        super().__init__(parameters)
        self._clip = clip
        self._norms: list[Tensor] = []

    def whole(self, gradient_bytes: int) -> bool:
        return True

    def take(self, terms: Terms, first_sample: int, outputs: range) -> None:
        norms = torch.stack(list(squared_norms(terms).values())).sum(0).sqrt()
        factors = self._clip / norms.clamp_min(self._clip)
        self._norms.append(norms)
        self.add({name: summed_rows(term, factors) for name, term in terms.items()})

    def state(self, samples: int) -> Checkpoint:
        norms = Checkpoint({"norms": torch.cat(self._norms)})
        return Checkpoint.of_sections(totals=super().state(samples), norms=norms)

    def resume(self, found: Checkpoint) -> None:
        super().resume(found.section("totals"))
        self._norms = [found.section("norms").tensors["norms"]]

    def result(self, *, one_output: bool) -> dict[str, Any]:
        norms = torch.cat(self._norms).squeeze(1)
        return {**super().result(one_output=one_output), "parameter_norms": {"": norms}}


class PulledBack(SampleSums):
    """Jᵀ u by parameter, of gradients and not of terms; with rows J' of another job J' Jᵀ u."""

    def __init__(self, parameters: Mapping[str, Tensor], against: Factored | None) -> None:
        super().__init__(parameters)
        self._against = against

    def take(self, terms: Terms, first_sample: int, outputs: range) -> None:
        raise NotImplementedError

    def result(self, *, one_output: bool) -> dict[str, Any]:
        result = super().result(one_output=one_output)
        if self._against is None:
            return result
        return {"arrays": {"jvp": self._against.jvp(result["arrays"])}}


def _device(terms: Terms) -> torch.device:
    return next(iter(next(iter(terms.values())).tensors().values())).device


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
