"""A factored result as tensors of a file, and the metadata that says what they stand for.

`docs/wire.md`, "Factored arrays", states the form.
"""

from __future__ import annotations

import json

from torch import Tensor

from gradbox.results.factor_metadata import FACTORS
from gradbox_factors import Factored, Term
from gradbox_factors.term import Identity, identity


def described(factors: Factored) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors by their names in the file, each once, and the metadata."""
    found: dict[Identity, str] = {}
    tensors: dict[str, Tensor] = {}

    def placed(term: Term, index: int) -> dict[str, str]:
        names = {}
        for name, factor in term.tensors().items():
            place = f"factors/{index}/{term.parameter}/{name}"
            # A layer's bias has the factor of its weight: one tensor of the file for both.
            names[name] = found.setdefault(identity(factor), place) if factor.numel() else place
            tensors.setdefault(names[name], factor)
        return names

    pieces = [
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
        for index, piece in enumerate(factors.pieces)
    ]
    return tensors, {FACTORS: json.dumps({"pieces": pieces}, separators=(",", ":"))}
