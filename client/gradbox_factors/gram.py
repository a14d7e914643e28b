"""The Gram of two lists of pieces, J J'ᵀ: of a layer from factors or from rows multiplied out.

`multiplications` chooses; a pair of pieces in which factors lose digits is made from rows as well.
Rows are made slab by slab, those of a piece once for all pieces that they meet.

Shapes: Y outputs, B samples of all pieces of one side and Y', B' of the other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from gradbox_factors.block import Positions
from gradbox_factors.lookup import Lookup
from gradbox_factors.multiplications import gram_is_of_pairs
from gradbox_factors.outer import Outer
from gradbox_factors.slabs import SLAB_BYTES, slabs
from gradbox_factors.sums import any_term, common_dtype, joined, sum_of, zeros_beside
from gradbox_factors.term import Term, identity

Piece = Mapping[str, Term]
Pieces = Sequence[Piece]


def names_of_pairs(pieces: Pieces, others: Pieces) -> frozenset[str]:
    """Return the parameters whose Grams are summed over pairs of positions."""
    return frozenset(name for name in pieces[0] if _is_of_pairs(name, pieces, others))


def _is_of_pairs(name: str, pieces: Pieces, others: Pieces) -> bool:
    mine = [piece[name] for piece in pieces]
    theirs = None if others is pieces else [piece[name] for piece in others]
    every = [*mine, *(theirs or [])]
    if all(isinstance(term, Lookup) for term in every):
        return True
    outers = [term for term in every if isinstance(term, Outer)]
    if len(outers) < len(every) or len({term.transposed for term in outers}) > 1:
        return False
    sizes = [term.sizes for term in outers]
    return gram_is_of_pairs(sizes[: len(mine)], sizes[len(mine) :] or None)


def gram_of(
    pieces: Pieces,
    others: Pieces,
    of_pairs: frozenset[str],
    cancelled: tuple[Sequence[bool], Sequence[bool]],
    *,
    trace: bool,
) -> Tensor:
    """Return the Gram, (Y, B, Y', B'), or its trace over outputs, (B, B').

    Args:
        others: `pieces` itself for a Gram of rows with themselves.
        of_pairs: what `names_of_pairs` gives.
        cancelled: of each side's pieces, whether sums over pairs would lose their digits.
    """
    dtype = torch.promote_types(common_dtype(pieces[0]), common_dtype(others[0]))
    biases = _biases((*pieces, *others), of_pairs)
    paired = [name for name in pieces[0] if name in of_pairs or name in biases.values()]
    parts = []
    for piece, mine in zip(pieces, cancelled[0], strict=True):
        row = []
        for other, theirs in zip(others, cancelled[1], strict=True):
            gram = _zeros(piece, other, dtype, trace=trace)
            if mine or theirs:
                for name in paired:
                    _add_rows(gram, *_terms(name, [piece], [other], dtype), trace=trace)
            else:
                gram = _with_pairs(gram, piece, other, of_pairs, biases, trace=trace)
            row.append(gram)
        parts.append(joined(row, -1))
    gram = joined(parts, 0 if trace else 1)
    # Linear layers first whichever way they go: one order of additions.
    for name in sorted(pieces[0], key=lambda name: not isinstance(pieces[0][name], Outer)):
        if name not in paired:
            _add_rows(gram, *_terms(name, pieces, others, dtype), trace=trace)
    return gram


def gram_bound(piece: Piece, of_pairs: frozenset[str]) -> Tensor | None:
    """Return the bound of what a Gram sums over pairs of positions, (Y, B)."""
    biases = _biases([piece], of_pairs)
    found = [t.pair_bound(shift=float(n in biases)) for n, t in piece.items() if n in of_pairs]
    bounds = [bound for bound in found if bound is not None]
    return sum_of(bounds) if bounds else None


def _with_pairs(
    gram: Tensor,
    piece: Piece,
    other: Piece,
    of_pairs: frozenset[str],
    biases: Mapping[str, str],
    *,
    trace: bool,
) -> Tensor:
    """Return `gram`, of zeros, and what two pieces' pairs of positions add to it."""
    one_position: list[tuple[Outer, Outer, float]] = []
    more_positions: list[tuple[Outer, Outer, float]] = []
    lookups: list[tuple[Lookup, Lookup]] = []
    for name in piece:
        if name not in of_pairs:
            continue
        ((mine,), (theirs,)) = _terms(name, [piece], [other], gram.dtype)
        if isinstance(mine, Outer) and isinstance(theirs, Outer):
            at_once = not trace and mine.right.shape[1] == theirs.right.shape[1] == 1
            shift = 1.0 if name in biases else 0.0
            (one_position if at_once else more_positions).append((mine, theirs, shift))
        elif isinstance(mine, Lookup) and isinstance(theirs, Lookup):
            lookups.append((mine, theirs))
    if one_position:
        gram = _gram_of_one_position(one_position)
    for layer, layer_too, shift in more_positions:
        (layer.add_gram_trace if trace else layer.add_gram)(gram, layer_too, shift=shift)
    for table, table_too in lookups:
        (table.add_gram_trace if trace else table.add_gram)(gram, table_too)
    return gram


def _add_rows(gram: Tensor, mine: Sequence[Term], theirs: Sequence[Term], *, trace: bool) -> None:
    """Add one parameter's J J'ᵀ to `gram` from rows multiplied out, slab by slab."""
    every = [*mine, *theirs]
    if any(all(term.rule == "zero" for term in side) for side in (mine, theirs)):
        return
    whole_bytes = sum(term.dense_bytes for term in every)
    flat = gram if trace else gram.view(-1, gram.shape[2] * gram.shape[3])
    slab_bytes = min(SLAB_BYTES, sum(term.slab_bytes for term in every))
    for start, stop in slabs(mine[0].num_rows, whole_bytes, slab_bytes):
        left = _flat_rows(mine, start, stop, beside=gram, trace=trace)
        same = theirs is mine
        right = left if same else _flat_rows(theirs, start, stop, beside=gram, trace=trace)
        flat.addmm_(left, right.T)


def _flat_rows(
    terms: Sequence[Term], start: int, stop: int, *, beside: Tensor, trace: bool
) -> Tensor:
    """Return rows start:stop of all pieces, (Y·B, n), or with `trace` (B, Y·n)."""
    counts = [term.samples for term in terms]
    sizes = (sum(counts), terms[0].outputs, stop - start, *terms[0].shape[1:])
    rows = beside.new_empty(sizes)
    for term, part in zip(terms, torch.split(rows, counts), strict=True):
        term.write_rows(part, start)
    return rows.flatten(1) if trace else rows.flatten(2).transpose(0, 1).flatten(0, 1)


def _terms(
    name: str, pieces: Pieces, others: Pieces, dtype: torch.dtype
) -> tuple[Sequence[Term], Sequence[Term]]:
    """Return a parameter's terms of both sides in `dtype`; one list for the same terms."""
    mine = [piece[name].to(dtype) for piece in pieces]
    same = len(pieces) == len(others)
    if same and all(a[name] is b[name] for a, b in zip(pieces, others, strict=True)):
        return mine, mine
    return mine, [other[name].to(dtype) for other in others]


def _zeros(piece: Piece, other: Piece, dtype: torch.dtype, *, trace: bool) -> Tensor:
    """Return a Gram of two pieces to which nothing was added, (Y, B, Y', B') or (B, B')."""
    first, second = any_term(piece), any_term(other)
    sizes = (first.outputs, first.samples, second.outputs, second.samples)
    return zeros_beside(first, dtype, sizes[1::2] if trace else sizes)


def _biases(pieces: Pieces, of_pairs: frozenset[str]) -> dict[str, str]:
    """Return weight → bias for layers whose bias shares the weight's factor in every piece.

    The bias of a linear layer is a weight for a constant input of 1, so its Gram comes with the
    weight's for one addition.
    """
    shared = [_sharing(piece) for piece in pieces]
    return {
        weight: bias
        for weight, bias in shared[0].items()
        if weight in of_pairs and all(one.get(weight) == bias for one in shared)
    }


def _sharing(piece: Piece) -> dict[str, str]:
    """Return weight → bias where both have one factor."""
    weights = {
        identity(term.left): name
        for name, term in piece.items()
        if isinstance(term, Outer) and not term.transposed
    }
    biases = {
        identity(term.left): name
        for name, term in piece.items()
        if isinstance(term, Positions) and not term.channels_first
    }
    return {weights[left]: name for left, name in biases.items() if left in weights}


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
