"""A Jacobian (B, Y, P) kept as terms, with the algebra that never forms it.

Shapes: B samples over all pieces, Y outputs, P parameters. A piece holds the samples of one shard.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gradbox_factors.hashing import Sketch
from gradbox_factors.term import Term

EVERYTHING = slice(None)


@dataclass(frozen=True)
class Factored:
    """Per-sample gradients or Jacobians of named parameters, one mapping name → term a shard.

    Every piece names the same parameters in the same order.
    """

    pieces: Sequence[Mapping[str, Term]]

    @property
    def names(self) -> tuple[str, ...]:
        """The parameters, in `named_parameters` order."""
        return tuple(self.pieces[0])

    @property
    def samples(self) -> int:
        """B."""
        return sum(_any(piece).samples for piece in self.pieces)

    @property
    def outputs(self) -> int:
        """Y."""
        return _any(self.pieces[0]).outputs

    @property
    def factor_bytes(self) -> int:
        """The size of the factors; a tensor that two terms share counts once."""
        sizes = {
            (factor.data_ptr(), factor.shape): factor.nbytes
            for piece in self.pieces
            for term in piece.values()
            for factor in term.tensors().values()
        }
        return sum(sizes.values())

    @property
    def dense_bytes(self) -> int:
        """The size of the arrays that the factors stand for."""
        return sum(term.dense_bytes for piece in self.pieces for term in piece.values())

    def block(self, name: str, samples: slice = EVERYTHING, outputs: slice = EVERYTHING) -> Tensor:
        """Return one parameter's array for some samples and outputs, shape (b, y, *shape)."""
        start, stop, step = samples.indices(self.samples)
        parts, seen = [], 0
        for piece in self.pieces:
            term = piece[name]
            inside = range(max(start, seen), min(stop, seen + term.samples))
            if len(inside):
                local = slice(inside.start - seen, inside.stop - seen)
                parts.append(term.narrow(local, outputs).block())
            seen += term.samples
        if not parts:
            return self.pieces[0][name].narrow(slice(0, 0), outputs).block()
        return (parts[0] if len(parts) == 1 else torch.cat(parts))[::step]

    def squared_norms(self) -> dict[str, Tensor]:
        """Return the squared norm of every sample's row, by parameter, shape (B, Y), float64."""
        return {
            name: torch.cat([piece[name].squared_norm() for piece in self.pieces])
            for name in self.names
        }

    def norms(self) -> Tensor:
        """Return the norm over all parameters, shape (B, Y)."""
        total = torch.stack(list(self.squared_norms().values())).sum(0)
        return total.sqrt().to(_any(self.pieces[0]).dtype)

    def gram(self, *, trace: bool = False) -> Tensor:
        """Return J Jᵀ, shape (B, Y, B, Y), or Σ_y J_y J_yᵀ, shape (B, B)."""
        rows = []
        for piece in self.pieces:
            rows.append(
                torch.cat(
                    [self._pair(piece, other, trace) for other in self.pieces], -1 if trace else 2
                )
            )
        return torch.cat(rows)

    def _pair(self, piece: Mapping[str, Term], other: Mapping[str, Term], trace: bool) -> Tensor:
        first, second = _any(piece), _any(other)
        sizes: tuple[int, ...] = (first.samples, first.outputs, second.samples, second.outputs)
        gram = _new(first, sizes[::2] if trace else sizes)
        for name, term in piece.items():
            if trace:
                term.add_gram_trace(gram, other[name])
            else:
                term.add_gram(gram, other[name])
        return gram

    def jvp(self, tangents: Mapping[str, Tensor]) -> Tensor:
        """Return J v, shape (B, Y); a parameter that `tangents` lacks has tangent 0."""
        rows = []
        for piece in self.pieces:
            total = _new(_any(piece), (_any(piece).samples, _any(piece).outputs))
            for name, term in piece.items():
                if name in tangents:
                    total += term.jvp(tangents[name])
            rows.append(total)
        return torch.cat(rows)

    def vjp(self, cotangents: Tensor) -> dict[str, Tensor]:
        """Return Jᵀ u by parameter, for `cotangents` of shape (B, Y)."""
        totals: dict[str, Tensor] = {}
        seen = 0
        for piece in self.pieces:
            count = _any(piece).samples
            for name, term in piece.items():
                part = term.vjp(cotangents[seen : seen + count])
                totals[name] = totals[name] + part if name in totals else part
            seen += count
        return totals

    def projection(self, dim: int, seed: int = 0) -> Tensor:
        """Return the seeded random projection of every row to `dim` numbers, shape (B, Y, dim)."""
        sketch = Sketch(dim, seed)
        return torch.cat([sum_of([t.sketch(sketch) for t in p.values()]) for p in self.pieces])


def sum_of(parts: Sequence[Tensor]) -> Tensor:
    """Return the sum of tensors of one shape."""
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total


def _any(piece: Mapping[str, Term]) -> Term:
    return next(iter(piece.values()))


def _new(term: Term, sizes: tuple[int, ...]) -> Tensor:
    device = next(iter(term.tensors().values())).device
    return torch.zeros(sizes, dtype=term.dtype, device=device)
