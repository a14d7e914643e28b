"""The problem table, put to the engine for its second derivatives."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gradbox_engine import CurvatureResult, curvature
from tests.cases import Case
from tests.device import DEVICE
from tests.engine.replay.running import question
from tests.oracle import wanted_parameters

NUM_VECTORS = 3


def vectors_of(case: Case, num_vectors: int = NUM_VECTORS) -> dict[str, Tensor]:
    """Return vectors for the parameters that a case differentiates by."""
    generator = torch.Generator().manual_seed(4)
    wanted = wanted_parameters(case.model(), case)
    return {
        name: torch.randn(num_vectors, *p.shape, dtype=torch.float64, generator=generator)
        for name, p in wanted.items()
    }


def curved(case: Case, vectors: dict[str, Tensor] | None = None, **terms: Any) -> CurvatureResult:
    """Let the engine multiply vectors; `terms` override the case's own."""
    groups, objective, told = question(case)
    del told["returns"]
    given = vectors_of(case) if vectors is None else vectors
    model = case.model().to(DEVICE)
    return curvature(model, groups, objective, given, **({"kind": "hessian"} | told | terms))
