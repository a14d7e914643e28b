"""Jobs that are killed at a chosen step, and what they leave for another process."""

from __future__ import annotations

import json

from torch import Tensor

from gradbox_engine import Checkpoint


class Kept:
    """Keeps the last state as a file would: copies of tensors, and text."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.text: str | None = None
        self.num_written = 0

    def due(self) -> bool:
        return True

    def write(self, checkpoint: Checkpoint) -> None:
        self.tensors = {name: x.detach().clone() for name, x in checkpoint.tensors.items()}
        self.text = json.dumps(checkpoint.facts)
        self.num_written += 1

    def read(self) -> Checkpoint | None:
        if self.text is None:
            return None
        copies = {name: tensor.clone() for name, tensor in self.tensors.items()}
        return Checkpoint(copies, json.loads(self.text))


class Killed(Exception):
    """The process ends here."""


class KilledAt:
    """Ends the job before a shard of a phase."""

    def __init__(self, phase: str, shard: int) -> None:
        self.place = (phase, shard)
        self.steps: list[tuple[str, int]] = []

    def step(self, phase: str, done: int, total: int) -> None:
        self.steps.append((phase, done))
        if (phase, done) == self.place:
            raise Killed


def undisturbed() -> KilledAt:
    """Return an observer that ends nothing."""
    return KilledAt("never", 0)
