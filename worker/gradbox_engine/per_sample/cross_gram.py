"""Inner products of a job's rows with rows that an earlier job left as factors: J J'ᵀ.

A shard's terms are multiplied with each piece of the other job's and dropped, so neither side's
rows are ever dense, and of this side's factors one shard's are in memory. Sums over pairs of
positions that lose their digits are made anew from rows, a pair of pieces at a time.
Cost: that of a Gram of B + B' samples less the two squares.

Shapes: B samples and Y outputs of this job, B' and Y' of the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gradbox_engine.checkpoint import Checkpoint
from gradbox_engine.errors import BadReduction
from gradbox_engine.per_sample.reductions import Collector, Terms
from gradbox_factors import Factored


class CrossGram(Collector):
    """J J'ᵀ, (B, Y, B', Y'), or its trace over outputs, (B, B')."""

    def __init__(self, other: Factored, *, trace: bool) -> None:
        self._other, self._trace = other, trace
        self._parts: list[Tensor] = []

    def whole(self, gradient_bytes: int) -> bool:
        return True

    def begin(self, samples: int, outputs: int) -> None:
        super().begin(samples, outputs)
        if self._trace and outputs != self._other.outputs:
            raise BadReduction(
                f"against: expected rows of {outputs} outputs, to sum over those of both, got "
                f"{self._other.outputs}; take reduce='gram'"
            )

    def take(self, terms: Terms, first_sample: int, outputs: range) -> None:
        self._parts.append(Factored([terms]).gram_with(self._other, trace=self._trace))

    def state(self, samples: int) -> Checkpoint:
        return Checkpoint({"gram": torch.cat(self._parts)})

    def resume(self, found: Checkpoint) -> None:
        self._parts = [found.tensors["gram"]]

    def result(self, *, one_output: bool) -> dict[str, Any]:
        gram = torch.cat(self._parts)
        return {"arrays": {"gram": gram[:, 0, :, 0] if one_output else gram}}


def check_names(names: Sequence[str], other: Factored) -> None:
    """Refuse rows by other parameters than a job's.

    Raises:
        BadReduction: a parameter is missing on one side, or their order differs.
    """
    if tuple(names) != other.names:
        differing = sorted(set(names) ^ set(other.names))[:3] or ["their order"]
        raise BadReduction(
            f"against: expected rows by the same {len(names)} parameters, got rows by "
            f"{len(other.names)}, which differ in {', '.join(differing)}; give both jobs one wrt"
        )
