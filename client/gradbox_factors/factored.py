"""A Jacobian (B, Y, P) kept as terms, with the algebra that never forms it.

Shapes: B samples over all pieces, Y outputs, P parameters. A piece holds the samples of one shard.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gradbox_factors.block import Positions
from gradbox_factors.hashing import Sketch
from gradbox_factors.outer import Outer, gram_of_one_position
from gradbox_factors.term import Term, identity

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
            identity(factor): factor.nbytes
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
        parts = [squared_norms(piece) for piece in self.pieces]
        return {name: torch.cat([part[name] for part in parts]) for name in self.names}

    def norms(self) -> Tensor:
        """Return the norm over all parameters, shape (B, Y)."""
        total = torch.stack(list(self.squared_norms().values())).sum(0)
        return total.sqrt().to(_any(self.pieces[0]).dtype)

    def gram(self, *, trace: bool = False) -> Tensor:
        """Return J Jᵀ, shape (B, Y, B, Y), or with `trace` Σ_y J_y J_yᵀ, shape (B, B)."""
        rows = [
            torch.cat([_pair(piece, other, trace=trace) for other in self.pieces], -1)
            if len(self.pieces) > 1
            else _pair(piece, piece, trace=trace)
            for piece in self.pieces
        ]
        if trace:
            return torch.cat(rows)
        whole = torch.cat(rows, 1) if len(rows) > 1 else rows[0]
        return whole.permute(1, 0, 3, 2)

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


def squared_norms(terms: Mapping[str, Term]) -> dict[str, Tensor]:
    """Return the squared norm of every sample's row by parameter, shape (B, Y), float64."""
    found: dict[str, Tensor] = {}
    lefts: dict[int, Tensor] = {}  # by the factor that a layer's weight and bias share
    for name, term in terms.items():
        if not isinstance(term, Outer | Positions) or term.left.shape[2] != 1 or _sideways(term):
            found[name] = term.squared_norm()
            continue
        square = lefts.get(id(term.left))
        if square is None:
            rows = term.left.select(2, 0)
            square = lefts[id(term.left)] = torch.linalg.vecdot(rows, rows).T.double()
        if isinstance(term, Outer):
            right = term.right.select(1, 0)
            square = square * torch.linalg.vecdot(right, right)[:, None]
        found[name] = square
    return found


def _sideways(term: Term) -> bool:
    """Whether dim 2 of the left factor does not count positions."""
    return isinstance(term, Positions) and term.channels_first


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


def _pair(piece: Mapping[str, Term], other: Mapping[str, Term], *, trace: bool) -> Tensor:
    """Return the Gram of two pieces, (Y, B, Y, B') or its trace (B, B')."""
    first, second = _any(piece), _any(other)
    sizes: tuple[int, ...] = (first.outputs, first.samples, second.outputs, second.samples)
    biased = _biased(piece, other)
    biases = set(biased.values())
    together: list[tuple[Outer, Outer, float]] = []
    linear: list[tuple[Outer, Outer, float]] = []
    others: list[tuple[Term, Term]] = []
    for name, term in piece.items():
        theirs = other[name]
        if isinstance(term, Outer) and isinstance(theirs, Outer):
            at_once = not trace and _one_position(term, theirs)
            shift = 1.0 if name in biased else 0.0
            (together if at_once else linear).append((term, theirs, shift))
        elif name not in biases:
            others.append((term, theirs))
    if together:
        gram = gram_of_one_position(together)
    else:
        gram = _new(first, sizes[1::2] if trace else sizes)
    for mine, layer, shift in linear:
        add = mine.add_gram_trace_with if trace else mine.add_gram_with
        add(gram, layer, shift=shift)
    for term, theirs in others:
        (term.add_gram_trace if trace else term.add_gram)(gram, theirs)
    return gram


def _one_position(first: Outer, second: Outer) -> bool:
    alone = first.right.shape[1] == second.right.shape[1] == 1
    return alone and first.pairs_are_cheaper(second)


def _biased(piece: Mapping[str, Term], other: Mapping[str, Term]) -> dict[str, str]:
    """Return weight → bias for layers whose bias shares the weight's factor in both pieces.

    The bias of a linear layer is a weight for a constant input of 1, so its Gram comes with the
    weight's for one addition.
    """
    weights = {
        identity(term.left): name
        for name, term in piece.items()
        if isinstance(term, Outer) and not term.transposed
    }
    found = {}
    for name, term in piece.items():
        if not isinstance(term, Positions) or term.channels_first:
            continue
        weight = weights.get(identity(term.left))
        if weight is None:
            continue
        mine, theirs, bias = piece[weight], other[weight], other[name]
        if (
            isinstance(mine, Outer)
            and isinstance(theirs, Outer)
            and isinstance(bias, Positions)
            and identity(theirs.left) == identity(bias.left)
            and mine.pairs_are_cheaper(theirs)
        ):
            found[weight] = name
    return found
