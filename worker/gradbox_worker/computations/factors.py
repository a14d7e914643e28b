"""A factored result as tensors of a file, and the metadata that says what they stand for.

`docs/wire.md`, "Factored arrays", states the form.
"""

from __future__ import annotations

import json

from torch import Tensor

from gradbox.results.factor_metadata import FACTORS
from gradbox_factors import Factored, packed


def described(factors: Factored) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors by their names in the file, each once, and the metadata."""
    tensors, pieces = packed(factors.pieces, prefix="factors/")
    return tensors, {FACTORS: json.dumps({"pieces": pieces}, separators=(",", ":"))}
