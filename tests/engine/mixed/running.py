"""The table of mixed problems, put to the engine."""

from __future__ import annotations

from typing import Any

from torch import nn

from gradbox_engine import Group, MixedResult, Objective, mixed_gradient
from tests.device import DEVICE
from tests.mixed_cases import MixedCase


def mixed_answer(case: MixedCase, model: nn.Module | None = None, **terms: Any) -> MixedResult:
    """Let the engine answer a case; `terms` override the case's own."""
    group, inner, outer, told = mixed_question(case)
    return mixed_gradient((model or case.model()).to(DEVICE), group, inner, outer, **(told | terms))


def mixed_question(case: MixedCase) -> tuple[Group, Objective, Objective, dict[str, Any]]:
    """Return a case as the engine's entry points take it: shards, inner, outer, and its terms."""
    leaves = case.leaves
    told = {
        "z": case.z,
        "seed": case.seed,
        "mode": case.mode,
        "output": case.output,
        "readout": case.readout,
        "returns": ("dfdz",),
    }
    read = {f"y.{name}": leaves[f"y.{name}"] for name in case.outer_reads}
    inner = Objective(case.inner, case.y, leaves)
    return Group("z", case.shards), inner, Objective(case.outer, case.outer_inputs, read), told
