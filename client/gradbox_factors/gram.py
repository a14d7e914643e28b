"""The Gram of two pieces of rows, J J'ᵀ, from factors, and from rows where factors lose digits.

Shapes: Y outputs, B samples of one piece and Y', B' of the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from gradbox_factors.block import Positions
from gradbox_factors.lookup import Lookup
from gradbox_factors.outer import Outer
from gradbox_factors.sums import any_term, common_dtype, sum_of, zeros_beside
from gradbox_factors.term import Term, identity

Piece = Mapping[str, Term]


def gram_of_pieces(piece: Piece, other: Piece, *, trace: bool) -> Tensor:
    """Return the Gram of two pieces, (Y, B, Y', B'), or its trace over outputs (B, B')."""
    dtype = _dtype_of_both(piece, other)
    biases = _biases(piece, other)
    one_position: list[tuple[Outer, Outer, float]] = []
    more_positions: list[tuple[Outer, Outer, float]] = []
    others: list[tuple[Term, Term]] = []
    for name, mine, theirs in _alike(piece, other, dtype):
        if isinstance(mine, Outer) and isinstance(theirs, Outer):
            at_once = not trace and _have_one_position(mine, theirs)
            shift = 1.0 if name in biases else 0.0
            (one_position if at_once else more_positions).append((mine, theirs, shift))
        elif name not in biases.values():
            others.append((mine, theirs))
    if one_position:
        gram = _gram_of_one_position(one_position)
    else:
        gram = _zeros(piece, other, dtype, trace=trace)
    for layer, theirs, shift in more_positions:
        (layer.add_gram_trace if trace else layer.add_gram)(gram, theirs, shift=shift)
    for term, beside in others:
        (term.add_gram_trace if trace else term.add_gram)(gram, beside)
    return gram


def gram_of_rows(piece: Piece, other: Piece, *, trace: bool) -> Tensor:
    """Return what `gram_of_pieces` does, from rows multiplied out: dearer, with all digits."""
    dtype = _dtype_of_both(piece, other)
    gram = _zeros(piece, other, dtype, trace=trace)
    for _, mine, theirs in _alike(piece, other, dtype):
        (Term.add_gram_trace if trace else Term.add_gram)(mine, gram, theirs)
    return gram


def gram_bound(piece: Piece) -> Tensor | None:
    """Return the bound of what `gram_of_pieces` sums over pairs of positions, (Y, B)."""
    if not any(isinstance(t, Outer | Lookup) and t.left.shape[2] > 1 for t in piece.values()):
        return None
    biases = _biases(piece, piece)
    found = [term.pair_bound(shift=float(name in biases)) for name, term in piece.items()]
    bounds = [bound for bound in found if bound is not None]
    return sum_of(bounds) if bounds else None


def _dtype_of_both(piece: Piece, other: Piece) -> torch.dtype:
    return torch.promote_types(common_dtype(piece), common_dtype(other))


def _zeros(piece: Piece, other: Piece, dtype: torch.dtype, *, trace: bool) -> Tensor:
    """Return a Gram of two pieces to which nothing was added, (Y, B, Y', B') or (B, B')."""
    first, second = any_term(piece), any_term(other)
    sizes = (first.outputs, first.samples, second.outputs, second.samples)
    return zeros_beside(first, dtype, sizes[1::2] if trace else sizes)


def _alike(piece: Piece, other: Piece, dtype: torch.dtype) -> Iterator[tuple[str, Term, Term]]:
    """Yield each parameter's terms of both pieces in `dtype`, one object for one term."""
    for name, term in piece.items():
        mine = term.to(dtype)
        yield name, mine, mine if other[name] is term else other[name].to(dtype)


def _biases(piece: Piece, other: Piece) -> dict[str, str]:
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


def _have_one_position(first: Outer, second: Outer) -> bool:
    alone = first.right.shape[1] == second.right.shape[1] == 1
    return alone and first.pairs_are_cheaper(second)


def _gram_of_one_position(pairs: Sequence[tuple[Outer, Outer, float]]) -> Tensor:
    """Return the sum of the Grams of several layers with T = 1, (Y, B, Y', B').

    Output by output through all layers, so that each slice of the result stays in the cache. Each
    pair has its `shift`, see `Outer.add_gram`.
    """
    first, second, _ = pairs[0]
    sizes = (first.outputs, first.samples, second.outputs, second.samples)
    gram = first.left.new_empty(sizes)
    varying: list[tuple[Tensor, Tensor, Tensor]] = []
    constant: list[tuple[Tensor, Tensor, Tensor]] = []
    for mine, other, shift in pairs:
        feature = mine.right.select(1, 0) @ other.right.select(1, 0).T
        if shift:
            feature.add_(shift)
        both_constant = _is_constant(mine.left) and (other is mine or _is_constant(other.left))
        (constant if both_constant else varying).append((mine.left, other.left, feature))
    if varying:
        _write_slices(gram, varying)
    else:
        gram.zero_()
    for left, right, feature in constant:
        weights = left[:, 0, 0] @ right[:, 0, 0].T
        for y, z in weights.nonzero().tolist():
            gram[y, :, z].add_(feature, alpha=float(weights[y, z]))
    return gram


def _write_slices(gram: Tensor, layers: Sequence[tuple[Tensor, Tensor, Tensor]]) -> None:
    """Write Σ (left · right) ∘ feature of all layers to `gram`, one slice y after another.

    Args:
        layers: left (Y, B, 1, O), right (Y', B', 1, O) and feature (B, B') of each.
    """
    B = gram.shape[1]
    transposed_rights = [right.flatten(0, 2).T for _, right, _ in layers]
    features = [feature[:, None] for _, _, feature in layers]
    lefts = [left.select(2, 0) for left, _, _ in layers]
    scratch = gram.new_empty(gram.shape[1:]) if len(layers) > 1 else gram[0]
    for y, slice_y in enumerate(gram):
        torch.mm(lefts[0][y], transposed_rights[0], out=slice_y.view(B, -1))
        slice_y.mul_(features[0])
        for left, right, feature in zip(
            lefts[1:], transposed_rights[1:], features[1:], strict=True
        ):
            torch.mm(left[y], right, out=scratch.view(B, -1))
            slice_y.addcmul_(scratch, feature)


def _is_constant(left: Tensor) -> bool:
    """Whether all samples have the same output gradients, as at z itself: the cotangents.

    A network that ends in a linear layer has them there, and a Gram then needs Y · Y' numbers of
    that layer instead of a product over all pairs of rows.
    """
    one = left[:, :1]
    return torch.equal(one, left[:, -1:]) and torch.equal(left, one.expand_as(left))
