"""A Jacobian (B, Y, P) kept as terms, with the algebra that never forms it.

Shapes: B samples over all pieces, Y outputs, P parameters. A piece holds the samples of one shard.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from gradbox_factors.block import Block, Zero
from gradbox_factors.dense_projection import Kind, projected_rows, projection_of
from gradbox_factors.gram import gram_bound, gram_of, names_of_pairs
from gradbox_factors.sums import any_term, common_dtype, joined, sum_of, zeros_beside
from gradbox_factors.term import Term, identity, nearly_cancelled
from gradbox_factors.total import Total

EVERYTHING = slice(None)
SMALLEST_SQUARE = 1e-24  # of a row, to which squares that float32 rounds to zero add nothing


@dataclass(frozen=True)
class Factored:
    """Per-sample gradients or Jacobians of named parameters, one mapping name → term a shard.

    Every piece names the same parameters in the same order.
    """

    pieces: Sequence[Mapping[str, Term]]

    @classmethod
    def of_arrays(cls, arrays: Mapping[str, Tensor], *, one_output: bool) -> Factored:
        """Return dense rows as terms.

        Args:
            arrays: name → (B, Y, *shape); (B, *shape) where there is `one_output`.
        """
        rows = {name: x.unsqueeze(1) if one_output else x for name, x in arrays.items()}
        return cls([{name: Block(name, tuple(x.shape[2:]), x) for name, x in rows.items()}])

    @property
    def names(self) -> tuple[str, ...]:
        """The parameters, in `named_parameters` order."""
        return tuple(self.pieces[0])

    @property
    def samples(self) -> int:
        """B."""
        return sum(any_term(piece).samples for piece in self.pieces)

    @property
    def outputs(self) -> int:
        """Y."""
        return any_term(self.pieces[0]).outputs

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
            return zeros_beside(term, term.dtype, (*sizes, *term.shape))
        parts, seen = [], 0
        for piece in self.pieces:
            term = piece[name]
            inside = range(max(start, seen), min(stop, seen + term.samples))
            if len(inside):
                local = slice(inside.start - seen, inside.stop - seen)
                parts.append(term.narrow(local, outputs).block())
            seen += term.samples
        return joined(parts, 0)[::step]

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

        From pairs of positions where that is cheaper, and from rows where pairs would lose too many
        digits: where the positions of a sample nearly cancel.
        """
        return self.gram_with(self, trace=trace)

    def gram_with(self, other: Factored, *, trace: bool = False) -> Tensor:
        """Return J J'ᵀ, shape (B, Y, B', Y'), or with `trace` Σ_y J_y J'_yᵀ, shape (B, B').

        Made as `gram` is.

        Args:
            other: rows by the same parameters in the same order.
        """
        of_pairs = names_of_pairs(self.pieces, other.pieces)
        cancelled = self._cancelled(of_pairs), other._cancelled(of_pairs)
        gram = gram_of(self.pieces, other.pieces, of_pairs, cancelled, trace=trace)
        return gram if trace else gram.permute(1, 0, 3, 2)

    def _cancelled(self, of_pairs: frozenset[str]) -> list[bool]:
        """Return which pieces have rows so small that sums over pairs would lose their digits."""
        if of_pairs not in self._found_cancelled:
            self._found_cancelled[of_pairs] = [_nearly_cancels(p, of_pairs) for p in self.pieces]
        return self._found_cancelled[of_pairs]

    @cached_property
    def _found_cancelled(self) -> dict[frozenset[str], list[bool]]:
        return {}

    def jvp(self, tangents: Mapping[str, Tensor]) -> Tensor:
        """Return J v, shape (B, Y); a parameter that `tangents` lacks has tangent 0."""
        rows = []
        for piece in self.pieces:
            first = any_term(piece)
            parts = [zeros_beside(first, torch.float32, (first.samples, first.outputs))]
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
            count = any_term(piece).samples
            for name, term in piece.items():
                part = summed_rows(term, cotangents[seen : seen + count])
                totals[name] = totals[name] + part if name in totals else part
            seen += count
        return {name: total.to(self.pieces[0][name].dtype) for name, total in totals.items()}

    def projection(self, dim: int, seed: int = 0, *, kind: Kind = "sketch") -> Tensor:
        """Return the seeded random projection of every row, shape (B, Y, K).

        K is `dim`, but for the kind "per_layer", of which `TwoSided.columns` says what is where.
        """
        named = projection_of(kind, dim, seed)
        return torch.cat([projected_rows(piece, named, list(piece)) for piece in self.pieces])


def squared_norms(terms: Mapping[str, Term]) -> dict[str, Tensor]:
    """Return the squared norm of every sample's row by parameter, shape (B, Y), float64.

    From factors widened to float64 where float32 may have lost squares to underflow or overflow;
    not for a row of zeros, for which that would take a third of a job's time.
    """
    found = {name: term.squared_norm() for name, term in terms.items()}
    narrow = {n: x for n, x in found.items() if _is_narrow(terms[n])}
    if not narrow:
        return found
    squares = torch.stack(list(narrow.values()))
    held = (squares > SMALLEST_SQUARE) & squares.isfinite()
    enough = held.flatten(1).all(1).tolist()
    for name, rows_BY, all_held in zip(narrow, held, enough, strict=True):
        if not (all_held or (rows_BY | _zero_rows(terms[name])).all()):
            found[name] = terms[name].to(torch.float64).squared_norm()
    return found


def _zero_rows(term: Term) -> Tensor:
    """Return which rows have output gradients of zero alone, (B, Y): a masked sample's, say."""
    if isinstance(term, Total):
        return torch.stack([_zero_rows(part) for part in term.terms]).all(0)
    first = next(iter(term.tensors().values()))
    zero = first[..., None].flatten(2).count_nonzero(2) == 0
    return zero if isinstance(term, Block | Zero) else zero.T


def _is_narrow(term: Term) -> bool:
    if term.rule == "zero" or term.dtype == torch.float64:
        return False
    return next(iter(term.tensors().values())).device.type != "mps"  # which has no float64


def _nearly_cancels(piece: Mapping[str, Term], of_pairs: frozenset[str]) -> bool:
    bound = gram_bound(piece, of_pairs)
    if bound is None:
        return False
    # The other parameters' squares only add to a row's, and may be dear.
    for terms in ({name: term for name, term in piece.items() if name in of_pairs}, piece):
        squares = torch.stack(list(squared_norms(terms).values())).sum(0).T
        if not nearly_cancelled(squares.to(bound.dtype), bound).any():
            return False
    return True


def summed_rows(term: Term, weights: Tensor) -> Tensor:
    """Return Σ_{b,y} u[b, y] J[b, y] in float32 or wider, for `weights` of any dtype."""
    wider = term.widened()
    return wider.vjp(weights.to(wider.dtype))
