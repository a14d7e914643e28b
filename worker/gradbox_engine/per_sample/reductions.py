"""What is done with a shard's terms: kept, written densely, or reduced.

A collector takes the terms of one shard after the other, in chunks of outputs where it can, and
`finish` gives the result.

Shapes: B samples over all shards, b of one, Y outputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from gradbox_engine.per_sample.arena import Arena, Sink
from gradbox_engine.per_sample.pieces import Pieces
from gradbox_factors import Block, Factored, Positions, Sketch, Term, squared_norms
from gradbox_factors.factored import common_dtype, summed_rows
from gradbox_factors.term import Identity, identity

Terms = Mapping[str, Term]


class Collector(Protocol):
    """Takes terms; `whole` says that it needs all outputs of a shard at once."""

    whole: bool

    def begin(self, samples: int, outputs: int) -> None:
        """Told B and Y before the first terms."""

    def take(self, terms: Terms, first_sample: int, outputs: range) -> None:
        """Take a shard's terms of some outputs."""


class ToArena:
    """Dense arrays in memory that is kept."""

    whole = False

    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        self.arrays: dict[str, Tensor] = {}
        self._sizes = (0, 0)

    def begin(self, samples: int, outputs: int) -> None:
        self._sizes = (samples, outputs)

    def take(self, terms: Terms, first_sample: int, outputs: range) -> None:
        if not self.arrays:
            shapes, dtypes = _layout(terms, self._sizes)
            self.arrays = self.arena.begin(shapes, dtypes, _device(terms))
        for term in terms.values():
            rows = slice(first_sample, first_sample + term.samples)
            self.arena.put(term, rows, slice(outputs.start, outputs.stop))


class ToSink:
    """Dense arrays handed on piece by piece."""

    whole = False

    def __init__(self, sink: Sink, budget_bytes: int) -> None:
        self._sink, self._pieces = sink, Pieces(budget_bytes)
        self._sizes = (0, 0)
        self._begun = False

    def begin(self, samples: int, outputs: int) -> None:
        self._sizes = (samples, outputs)

    def take(self, terms: Terms, first_sample: int, outputs: range) -> None:
        if not self._begun:
            self._sink.begin(*_layout(terms, self._sizes))
            self._begun = True
        for term in terms.values():
            self._pieces.send(term, self._sink, first_sample, outputs.start)


class Keep:
    """The factors themselves; `smaller` puts a term's array in its place where that is smaller."""

    whole = True

    def __init__(self, *, smaller: bool = False) -> None:
        self._smaller = smaller
        self._pieces: list[dict[str, Term]] = []

    @property
    def factors(self) -> Factored:
        """What was kept."""
        return Factored(self._pieces)

    def begin(self, samples: int, outputs: int) -> None:
        """Nothing to prepare."""

    def take(self, terms: Terms, first_sample: int, outputs: range) -> None:
        self._pieces.append(smaller_forms(terms) if self._smaller else dict(terms))


class Norms:
    """Squared norms by parameter, (B, Y)."""

    whole = False

    def __init__(self) -> None:
        self.squares: dict[str, Tensor] = {}
        self._sizes = (0, 0)

    def begin(self, samples: int, outputs: int) -> None:
        self._sizes = (samples, outputs)

    def take(self, terms: Terms, first_sample: int, outputs: range) -> None:
        for name, squared in squared_norms(terms).items():
            if squared.shape == self._sizes:
                self.squares[name] = squared
                continue
            total = self.squares.setdefault(name, squared.new_zeros(self._sizes))
            rows = slice(first_sample, first_sample + squared.shape[0])
            total[rows, outputs.start : outputs.stop] = squared


class Projected:
    """A seeded random projection, (B, Y, dim)."""

    whole = False

    def __init__(self, sketch: Sketch) -> None:
        self._sketch = sketch
        self._sizes = (0, 0)
        self.total: Tensor | None = None

    def begin(self, samples: int, outputs: int) -> None:
        self._sizes = (samples, outputs)

    def take(self, terms: Terms, first_sample: int, outputs: range) -> None:
        for term in terms.values():
            part = term.widened().sketch(self._sketch)
            if self.total is None:
                sizes = (*self._sizes, self._sketch.dim)
                self.total = part.new_zeros(sizes, dtype=common_dtype(terms))
            rows = slice(first_sample, first_sample + term.samples)
            self.total[rows, outputs.start : outputs.stop] += part


class Directional:
    """J v, (B, Y)."""

    whole = False

    def __init__(self, tangents: Mapping[str, Tensor]) -> None:
        self._tangents = tangents
        self._sizes = (0, 0)
        self.total: Tensor | None = None

    def begin(self, samples: int, outputs: int) -> None:
        self._sizes = (samples, outputs)

    def take(self, terms: Terms, first_sample: int, outputs: range) -> None:
        for name, term in terms.items():
            if name in self._tangents:
                wider = term.widened()
                part = wider.jvp(self._tangents[name].to(wider.dtype))
                if self.total is None:
                    self.total = part.new_zeros(self._sizes, dtype=common_dtype(terms))
                rows = slice(first_sample, first_sample + term.samples)
                self.total[rows, outputs.start : outputs.stop] += part


class ClippedSum:
    """Σ_b g_b · min(1, clip/‖g_b‖) by parameter."""

    whole = True

    def __init__(self, clip: float) -> None:
        self._clip = clip
        self.totals: dict[str, Tensor] = {}
        self.norms: list[Tensor] = []

    def begin(self, samples: int, outputs: int) -> None:
        """Nothing to prepare."""

    def take(self, terms: Terms, first_sample: int, outputs: range) -> None:
        squared = torch.stack(list(squared_norms(terms).values())).sum(0)
        norms = squared.sqrt()
        factors = self._clip / norms.clamp_min(self._clip)
        self.norms.append(norms)
        for name, term in terms.items():
            part = summed_rows(term, factors)
            self.totals[name] = self.totals[name] + part if name in self.totals else part


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


def _layout(
    terms: Terms, sizes: tuple[int, int]
) -> tuple[dict[str, tuple[int, ...]], dict[str, torch.dtype]]:
    shapes = {name: (*sizes, *term.shape) for name, term in terms.items()}
    return shapes, {name: term.dtype for name, term in terms.items()}


def _device(terms: Terms) -> torch.device:
    return next(iter(next(iter(terms.values())).tensors().values())).device
