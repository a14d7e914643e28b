"""Terms taken apart into tensors and JSON values, and put together again.

`docs/wire.md`, "Factored arrays", states the form, which a result file and a checkpoint share.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from gradbox_factors.term import Identity, Term, identity
from gradbox_factors.total import TERMS


def packed(
    pieces: Sequence[Mapping[str, Term]], *, prefix: str = ""
) -> tuple[dict[str, Tensor], list[list[dict[str, Any]]]]:
    """Return the factors by name, each tensor once, and which of them make which term.

    Args:
        prefix: what all names begin with.
    """
    found: dict[Identity, str] = {}
    tensors: dict[str, Tensor] = {}

    def placed(term: Term, index: int) -> dict[str, str]:
        names = {}
        for name, factor in term.tensors().items():
            place = f"{prefix}{index}/{term.parameter}/{name}"
            # A layer's bias has the factor of its weight: one tensor of the file for both.
            names[name] = found.setdefault(identity(factor), place) if factor.numel() else place
            tensors.setdefault(names[name], factor)
        return names

    described = [
        [
            {
                "parameter": name,
                "shape": list(term.shape),
                "rule": term.rule,
                "geometry": term.geometry(),
                "tensors": placed(term, index),
            }
            for name, term in piece.items()
        ]
        for index, piece in enumerate(pieces)
    ]
    return tensors, described


def unpacked(
    tensors: Mapping[str, Tensor], described: Sequence[Sequence[Mapping[str, Any]]]
) -> list[dict[str, Term]]:
    """Return the pieces that `packed` took apart; it trusts what it is given."""
    return [{term["parameter"]: _term(tensors, term) for term in piece} for piece in described]


def _term(tensors: Mapping[str, Tensor], term: Mapping[str, Any]) -> Term:
    factors = {own: tensors[name] for own, name in term["tensors"].items()}
    kind = TERMS[term["rule"]]
    return kind.read(term["parameter"], tuple(term["shape"]), term["geometry"], factors)
