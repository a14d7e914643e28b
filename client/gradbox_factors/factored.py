"""A Jacobian (B, Y, P) kept as terms, with the algebra that never forms it.

Shapes: B samples over all pieces, Y outputs, P parameters. A piece holds the samples of one shard.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gradbox_factors.block import Positions
from gradbox_factors.hashing import Sketch
from gradbox_factors.lookup import Lookup
from gradbox_factors.outer import Outer, gram_of_one_position
from gradbox_factors.term import Term, identity, nearly_cancelled, wide

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
        sizes = (len(range(start, stop, step)), len(range(*outputs.indices(self.outputs))))
        if 0 in sizes:
            term = self.pieces[0][name]
            return _new(term, term.dtype, (*sizes, *term.shape))
        parts, seen = [], 0
        for piece in self.pieces:
            term = piece[name]
            inside = range(max(start, seen), min(stop, seen + term.samples))
            if len(inside):
                local = slice(inside.start - seen, inside.stop - seen)
                parts.append(term.narrow(local, outputs).block())
            seen += term.samples
        return (parts[0] if len(parts) == 1 else torch.cat(parts))[::step]

    def squared_norms(self) -> dict[str, Tensor]:
        """Return the squared norm of every sample's row, by parameter, shape (B, Y), float64."""
        parts = [squared_norms(piece) for piece in self.pieces]
        return {name: torch.cat([part[name] for part in parts]) for name in self.names}

    def norms(self) -> Tensor:
        """Return the norm over all parameters, shape (B, Y)."""
        total = torch.stack(list(self.squared_norms().values())).sum(0)
        return total.sqrt().to(common_dtype(self.pieces[0]))

    def gram(self, *, trace: bool = False) -> Tensor:
        """Return J Jᵀ, shape (B, Y, B, Y), or with `trace` Σ_y J_y J_yᵀ, shape (B, B).

        From pairs of positions where that is cheaper, and again from rows where pairs have lost
        too many digits: a sample whose positions nearly cancel.
        """
        gram = self._paired(_pair, trace=trace)
        if self._cancels(gram, trace=trace):
            gram = self._paired(_pair_of_rows, trace=trace)
        return gram if trace else gram.permute(1, 0, 3, 2)

    def _paired(self, pair: Callable[..., Tensor], *, trace: bool) -> Tensor:
        """Return the Gram of all pieces, (Y, B, Y, B) or its trace (B, B)."""
        rows = [
            torch.cat([pair(piece, other, trace=trace) for other in self.pieces], -1)
            if len(self.pieces) > 1
            else pair(piece, piece, trace=trace)
            for piece in self.pieces
        ]
        return torch.cat(rows, 0 if trace else 1) if len(rows) > 1 else rows[0]

    def _cancels(self, gram: Tensor, *, trace: bool) -> bool:
        """Whether a row is so small next to its positions that sums over pairs lost its digits."""
        bounds = [_pair_bound(piece) for piece in self.pieces]
        if all(bound is None for bound in bounds):
            return False
        bound = torch.cat(
            [
                _new(first, gram.dtype, (first.outputs, first.samples)) if found is None else found
                for found, first in zip(bounds, map(_any, self.pieces), strict=True)
            ],
            1,
        )
        if trace:
            return bool(nearly_cancelled(gram.diagonal(), bound.sum(0)).any())
        squares = gram.flatten(2).flatten(0, 1).diagonal().view(bound.shape)
        return bool(nearly_cancelled(squares, bound).any())

    def jvp(self, tangents: Mapping[str, Tensor]) -> Tensor:
        """Return J v, shape (B, Y); a parameter that `tangents` lacks has tangent 0."""
        rows = []
        for piece in self.pieces:
            first = _any(piece)
            parts = [_new(first, torch.float32, (first.samples, first.outputs))]
            for name in piece:
                if name in tangents:
                    term = piece[name].widened()
                    parts.append(term.jvp(tangents[name].to(term.dtype)))
            rows.append(sum_of(parts))
        return torch.cat(rows)

    def vjp(self, cotangents: Tensor) -> dict[str, Tensor]:
        """Return Jᵀ u by parameter, for `cotangents` of shape (B, Y)."""
        totals: dict[str, Tensor] = {}
        seen = 0
        for piece in self.pieces:
            count = _any(piece).samples
            for name, term in piece.items():
                part = summed_rows(term, cotangents[seen : seen + count])
                totals[name] = totals[name] + part if name in totals else part
            seen += count
        return totals

    def projection(self, dim: int, seed: int = 0) -> Tensor:
        """Return the seeded random projection of every row to `dim` numbers, shape (B, Y, dim)."""
        sketch = Sketch(dim, seed)
        return torch.cat(
            [sum_of([t.widened().sketch(sketch) for t in p.values()]) for p in self.pieces]
        )


def squared_norms(terms: Mapping[str, Term]) -> dict[str, Tensor]:
    """Return the squared norm of every sample's row by parameter, shape (B, Y), float64."""
    found: dict[str, Tensor] = {}
    lefts: dict[int, Tensor] = {}  # by the factor that a layer's weight and bias share
    for name, term in terms.items():
        if (
            not isinstance(term, Outer | Positions)
            or term.left.shape[2] != 1
            or _channels_first(term)
        ):
            found[name] = term.squared_norm()
            continue
        square = lefts.get(id(term.left))
        if square is None:
            rows = wide(term.left.select(2, 0))
            square = lefts[id(term.left)] = torch.linalg.vecdot(rows, rows).T.double()
        if isinstance(term, Outer):
            right = wide(term.right.select(1, 0))
            square = square * torch.linalg.vecdot(right, right)[:, None]
        found[name] = square
    return found


def _channels_first(term: Term) -> bool:
    """Whether dim 2 of the left factor does not count positions."""
    return isinstance(term, Positions) and term.channels_first


def sum_of(parts: Sequence[Tensor]) -> Tensor:
    """Return the sum of tensors of one shape, in the widest of their dtypes."""
    total = parts[0].to(_widest(part.dtype for part in parts), copy=True)
    for part in parts[1:]:
        total += part
    return total


def _any(piece: Mapping[str, Term]) -> Term:
    return next(iter(piece.values()))


def common_dtype(terms: Mapping[str, Term]) -> torch.dtype:
    """Return the dtype of what is summed over parameters: their widest, and float32 at least."""
    return _widest({term.dtype for term in terms.values()})


def summed_rows(term: Term, weights: Tensor) -> Tensor:
    """Return Σ_{b,y} u[b, y] J[b, y] in the parameter's dtype, for `weights` of any."""
    wider = term.widened()
    return wider.vjp(weights.to(wider.dtype)).to(term.dtype)


def _widest(dtypes: Iterable[torch.dtype]) -> torch.dtype:
    return functools.reduce(torch.promote_types, dtypes, torch.float32)


def _new(term: Term, dtype: torch.dtype, sizes: tuple[int, ...]) -> Tensor:
    device = next(iter(term.tensors().values())).device
    return torch.zeros(sizes, dtype=dtype, device=device)


def _gram_sizes(first: Term, second: Term, *, trace: bool) -> tuple[int, ...]:
    sizes = (first.outputs, first.samples, second.outputs, second.samples)
    return sizes[1::2] if trace else sizes


def _alike(
    piece: Mapping[str, Term], other: Mapping[str, Term], dtype: torch.dtype
) -> Iterator[tuple[str, Term, Term]]:
    """Yield each parameter's terms of both pieces in `dtype`, one object for one term."""
    for name, term in piece.items():
        mine = term.to(dtype)
        yield name, mine, mine if other[name] is term else other[name].to(dtype)


def _pair_of_rows(piece: Mapping[str, Term], other: Mapping[str, Term], *, trace: bool) -> Tensor:
    """Return what `_pair` does, from rows multiplied out: for more, and with all their digits."""
    dtype = common_dtype(piece)
    gram = _new(_any(piece), dtype, _gram_sizes(_any(piece), _any(other), trace=trace))
    for _, mine, theirs in _alike(piece, other, dtype):
        (Term.add_gram_trace if trace else Term.add_gram)(mine, gram, theirs)
    return gram


def _pair_bound(piece: Mapping[str, Term]) -> Tensor | None:
    """Return the sum of the bounds of what `_pair` sums over pairs of positions, (Y, B)."""
    if not any(isinstance(t, Outer | Lookup) and t.left.shape[2] > 1 for t in piece.values()):
        return None
    biased = _biased(piece, piece)
    found = [term.pair_bound(shift=float(name in biased)) for name, term in piece.items()]
    bounds = [bound for bound in found if bound is not None]
    return sum_of(bounds) if bounds else None


def _pair(piece: Mapping[str, Term], other: Mapping[str, Term], *, trace: bool) -> Tensor:
    """Return the Gram of two pieces, (Y, B, Y, B') or its trace (B, B')."""
    dtype = common_dtype(piece)
    biased = _biased(piece, other)
    biases = set(biased.values())
    together: list[tuple[Outer, Outer, float]] = []
    linear: list[tuple[Outer, Outer, float]] = []
    others: list[tuple[Term, Term]] = []
    for name, term, theirs in _alike(piece, other, dtype):
        if isinstance(term, Outer) and isinstance(theirs, Outer):
            at_once = not trace and _one_position(term, theirs)
            shift = 1.0 if name in biased else 0.0
            (together if at_once else linear).append((term, theirs, shift))
        elif name not in biases:
            others.append((term, theirs))
    if together:
        gram = gram_of_one_position(together)
    else:
        gram = _new(_any(piece), dtype, _gram_sizes(_any(piece), _any(other), trace=trace))
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
