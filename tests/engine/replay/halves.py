"""The problem table, put to the engine in two halves with the loss between them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from gradbox_engine import (
    CotangentGradient,
    FirstOutputs,
    Group,
    KeptPass,
    SetOutputs,
    gradient_at_cotangents,
    set_outputs,
)
from gradbox_engine.model.calling.outputs import Outputs
from tests.cases import Case
from tests.device import DEVICE, moved


def first_outputs(answer: SetOutputs) -> FirstOutputs:
    """Return what the first half answered in the form that the second one takes."""
    outputs = {
        group: {"": z} if isinstance(z, Tensor) else z for group, z in answer.outputs.items()
    }
    return FirstOutputs(outputs, answer.rows, answer.stateful)


@dataclass
class Halves:
    """A case whose first half has run on a model."""

    case: Case
    model: nn.Module
    groups: list[Group]
    told: dict[str, Any]
    first: SetOutputs

    @property
    def kept(self) -> KeptPass:
        assert self.first.kept is not None
        return self.first.kept

    @property
    def found(self) -> FirstOutputs:
        return first_outputs(self.first)

    def cotangents(self) -> dict[str, Outputs]:
        """Return ∂L/∂Z of the case's loss."""
        leaves = {
            group: {name: z.detach().clone().requires_grad_() for name, z in named.items()}
            for group, named in self.found.outputs.items()
        }
        zs = {group: named.get("", named) for group, named in leaves.items()}
        precise = {g: z.double() if isinstance(z, Tensor) else z for g, z in zs.items()}
        inputs = moved(self.case.loss_inputs)
        if len(zs) == 1:
            loss = self.case.loss(*precise.values(), **inputs)
        else:
            loss = self.case.loss(**precise, **inputs)
        loss.backward()
        return {
            group: {name: leaf.grad for name, leaf in named.items() if leaf.grad is not None}
            for group, named in leaves.items()
        }

    def gradient(
        self, cotangents: dict[str, Outputs] | None = None, **terms: Any
    ) -> CotangentGradient:
        """Run the second half, from what was kept if anything was."""
        return gradient_at_cotangents(
            self.model,
            self.groups,
            self.cotangents() if cotangents is None else cotangents,
            self.first.kept or self.found,
            **(self.told | terms),
        )


def first_half(
    case: Case, model: nn.Module | None = None, *, retain: Any = 0, older: Any = None, **terms: Any
) -> Halves:
    """Run the first half; `terms` override the case's own."""
    order = terms.pop("order", None)
    groups = [
        Group(name, shards, method=case.methods.get(name, "forward"), order=order)
        for name, shards in case.groups.items()
    ]
    told = {
        "seed": case.seed,
        "mode": case.mode,
        "wrt": case.wrt,
        "output": case.output,
        "readout": case.readout,
        **terms,
    }
    model = (model or case.model()).to(DEVICE)
    beside = {} if older is None else {"older": older}
    first = set_outputs(model, groups, retain=retain, **beside, **told)
    return Halves(case, model, groups, told, first)
