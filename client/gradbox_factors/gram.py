"""The Gram of two pieces of rows, J Jᵀ, from factors, and from rows where factors lose digits.

Shapes: Y outputs, B samples of one piece and B' of the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from gradbox_factors.block import Positions
from gradbox_factors.lookup import Lookup
from gradbox_factors.outer import Outer, gram_of_one_position
from gradbox_factors.sums import any_term, common_dtype, sum_of, zeros_beside
from gradbox_factors.term import Term, identity


def _zeros(
    piece: Mapping[str, Term], other: Mapping[str, Term], dtype: torch.dtype, *, trace: bool
) -> Tensor:
    """Return a Gram of two pieces to which nothing was added, (Y, B, Y', B') or (B, B')."""
    first, second = any_term(piece), any_term(other)
    sizes = (first.outputs, first.samples, second.outputs, second.samples)
    return zeros_beside(first, dtype, sizes[1::2] if trace else sizes)


def _alike(
    piece: Mapping[str, Term], other: Mapping[str, Term], dtype: torch.dtype
) -> Iterator[tuple[str, Term, Term]]:
    """Yield each parameter's terms of both pieces in `dtype`, one object for one term."""
    for name, term in piece.items():
        mine = term.to(dtype)
        yield name, mine, mine if other[name] is term else other[name].to(dtype)


def _dtype_of_both(piece: Mapping[str, Term], other: Mapping[str, Term]) -> torch.dtype:
    return torch.promote_types(common_dtype(piece), common_dtype(other))


def gram_of_rows(piece: Mapping[str, Term], other: Mapping[str, Term], *, trace: bool) -> Tensor:
    """Return what `gram_of_pieces` does, from rows multiplied out: dearer, with all digits."""
    dtype = _dtype_of_both(piece, other)
    gram = _zeros(piece, other, dtype, trace=trace)
    for _, mine, theirs in _alike(piece, other, dtype):
        (Term.add_gram_trace if trace else Term.add_gram)(mine, gram, theirs)
    return gram


def gram_bound(piece: Mapping[str, Term]) -> Tensor | None:
    """Return the bound of what `gram_of_pieces` sums over pairs of positions, (Y, B)."""
    if not any(isinstance(t, Outer | Lookup) and t.left.shape[2] > 1 for t in piece.values()):
        return None
    biased = _biased(piece, piece)
    found = [term.pair_bound(shift=float(name in biased)) for name, term in piece.items()]
    bounds = [bound for bound in found if bound is not None]
    return sum_of(bounds) if bounds else None


def gram_of_pieces(piece: Mapping[str, Term], other: Mapping[str, Term], *, trace: bool) -> Tensor:
    """Return the Gram of two pieces, (Y, B, Y, B') or its trace (B, B')."""
    dtype = _dtype_of_both(piece, other)
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
    gram = gram_of_one_position(together) if together else _zeros(piece, other, dtype, trace=trace)
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
