"""What is done with a shard's terms: written densely, or reduced; `kept_factors` keeps them.

A collector takes the terms of one shard after the other, in chunks of outputs where it can; its
`result` are fields of `SampleResult`. Between two shards its `state` is what another process goes
on from; rows that a sink took are not in it.

Shapes: B samples over all shards, b of one, Y outputs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from gradbox_engine.checkpoint import Checkpoint
from gradbox_engine.errors import BadReduction
from gradbox_engine.model.precision import accumulation_dtype
from gradbox_engine.per_sample.pieces import Pieces, Sink
from gradbox_factors import DenseProjection, Factored, Sketch, Term, projected, squared_norms
from gradbox_factors.factored import summed_rows
from gradbox_factors.sums import common_dtype

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


class Norms(Collector):
    """Norms over all parameters and by parameter, (B, Y)."""

    def __init__(self) -> None:
        self._squares: dict[str, Tensor] = {}

    def take(self, terms: Terms, first_sample: int, outputs: range) -> None:
        for name, squared in squared_norms(terms).items():
            if squared.shape == self._sizes:
                self._squares[name] = squared
                continue
            total = self._squares.setdefault(name, squared.new_zeros(self._sizes))
            total[self._rows(terms[name], first_sample, outputs)] = squared

    def state(self, samples: int) -> Checkpoint:
        return Checkpoint({name: squared[:samples] for name, squared in self._squares.items()})

    def resume(self, found: Checkpoint) -> None:
        self._squares = {name: self._with_room(rows) for name, rows in found.tensors.items()}

    def result(self, *, one_output: bool) -> dict[str, Any]:
        total = torch.stack(list(self._squares.values())).sum(0).sqrt()
        norms = {"": total, **{name: x.sqrt() for name, x in self._squares.items()}}
        if one_output:
            norms = {name: x.squeeze(1) for name, x in norms.items()}
        return {"arrays": {"norm": norms.pop("")}, "parameter_norms": norms}


class _Summed(Collector):
    """Numbers of every row that are summed over parameters, (B, Y, ...)."""

    name: str

    def __init__(self) -> None:
        self._total: Tensor | None = None

    def _part(self, name: str, term: Term) -> Tensor | None:
        """Return one parameter's numbers, (b, y, ...), None for a parameter that adds nothing."""
        raise NotImplementedError

    def take(self, terms: Terms, first_sample: int, outputs: range) -> None:
        for name, term in terms.items():
            part = self._part(name, term.widened())
            if part is None:
                continue
            if self._total is None:
                sizes = (*self._sizes, *part.shape[2:])
                self._total = part.new_zeros(sizes, dtype=common_dtype(terms))
            self._total[self._rows(term, first_sample, outputs)] += part

    def state(self, samples: int) -> Checkpoint:
        return Checkpoint({} if self._total is None else {"total": self._total[:samples]})

    def resume(self, found: Checkpoint) -> None:
        if "total" in found.tensors:
            self._total = self._with_room(found.tensors["total"])

    def result(self, *, one_output: bool) -> dict[str, Any]:
        if self._total is None:
            return {"arrays": {}}
        return {"arrays": {self.name: self._total.squeeze(1) if one_output else self._total}}


class Projected(_Summed):
    """A seeded random projection, (B, Y, dim)."""

    name = "projection"

    def __init__(self, projection: Sketch | DenseProjection) -> None:
        super().__init__()
        self._projection = projection

    def _part(self, name: str, term: Term) -> Tensor | None:
        return projected(term, self._projection)


class Directional(_Summed):
    """J v, (B, Y)."""

    name = "jvp"

    def __init__(self, tangents: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._tangents = tangents

    def _part(self, name: str, term: Term) -> Tensor | None:
        tangent = self._tangents.get(name)
        return None if tangent is None else term.jvp(tangent.to(_device({name: term}), term.dtype))


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


class ClippedSum(Collector):
    """Σ_b g_b · min(1, clip/‖g_b‖) by parameter, summed in float32 or wider."""

    def __init__(self, clip: float, parameters: Mapping[str, Tensor]) -> None:
        self._clip, self._parameters = clip, parameters
        self._totals: dict[str, Tensor] = {}
        self._norms: list[Tensor] = []

    def whole(self, gradient_bytes: int) -> bool:
        return True

    def take(self, terms: Terms, first_sample: int, outputs: range) -> None:
        squared = torch.stack(list(squared_norms(terms).values())).sum(0)
        norms = squared.sqrt()
        factors = self._clip / norms.clamp_min(self._clip)
        self._norms.append(norms)
        for name, term in terms.items():
            part = summed_rows(term, factors)
            self._totals[name] = self._totals[name] + part if name in self._totals else part

    def state(self, samples: int) -> Checkpoint:
        norms = Checkpoint({"norms": torch.cat(self._norms)})
        return Checkpoint.of_sections(totals=Checkpoint(self._totals), norms=norms)

    def resume(self, found: Checkpoint) -> None:
        self._totals = dict(found.section("totals").tensors)
        self._norms = [found.section("norms").tensors["norms"]]

    def result(self, *, one_output: bool) -> dict[str, Any]:
        return {
            "arrays": {n: x.to(self._parameters[n].dtype) for n, x in self._totals.items()},
            "parameter_norms": {"": torch.cat(self._norms).squeeze(1)},
        }


class PulledBack(Collector):
    """Jᵀ u by parameter, of gradients and not of terms; with rows J' of another job J' Jᵀ u."""

    def __init__(self, parameters: Mapping[str, Tensor], against: Factored | None) -> None:
        self._parameters, self._against = parameters, against
        self._totals: dict[str, Tensor] = {}

    def add(self, gradients: Mapping[str, Tensor]) -> None:
        """Add a shard's."""
        for name, gradient in gradients.items():
            part = gradient.to(accumulation_dtype(gradient.dtype))
            self._totals[name] = self._totals[name] + part if name in self._totals else part

    def take(self, terms: Terms, first_sample: int, outputs: range) -> None:
        raise NotImplementedError

    def state(self, samples: int) -> Checkpoint:
        return Checkpoint(self._totals)

    def resume(self, found: Checkpoint) -> None:
        self._totals = dict(found.tensors)

    def result(self, *, one_output: bool) -> dict[str, Any]:
        totals = {n: x.to(self._parameters[n].dtype) for n, x in self._totals.items()}
        return {"arrays": totals if self._against is None else {"jvp": self._against.jvp(totals)}}


def _device(terms: Terms) -> torch.device:
    return next(iter(next(iter(terms.values())).tensors().values())).device
