"""The problem table, put to the engine."""

from __future__ import annotations

from typing import Any

from torch import nn

from gradbox_engine import Group, Objective, SetGradient, set_gradient
from tests.cases import Case
from tests.device import DEVICE


def answer(case: Case, model: nn.Module | None = None, **terms: Any) -> SetGradient:
    """Let the engine answer a case; `terms` override the case's own."""
    groups, objective, told = question(case)
    model = (model or case.model()).to(DEVICE)
    return set_gradient(model, groups, objective, **(told | terms))


def question(case: Case) -> tuple[list[Group], Objective, dict[str, Any]]:
    """Return a case as the engine's entry points take it."""
    groups = [
        Group(name, shards, method=case.methods.get(name, "forward"))
        for name, shards in case.groups.items()
    ]
    told = {
        "seed": case.seed,
        "mode": case.mode,
        "wrt": case.wrt,
        "output": case.output,
        "readout": case.readout,
        "returns": ("grads", "buffers"),
    }
    return groups, Objective(case.loss, case.loss_inputs, case.loss_parameters), told
