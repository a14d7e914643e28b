"""The state of a long job, from which another process goes on after a crash.

Every computation hands out and takes in the same thing, a `Checkpoint`: tensors by name, and JSON
values. After each shard it asks whether it is `due`; the caller stores it, the engine writes no
files. Random streams are never in it, for each shard's is derived from its numbers; nor is what a
computation finds again from what is there, such as cotangents from Z.

A job that goes on returns what an undisturbed one does, on a CPU with the same bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor


@dataclass(frozen=True)
class Checkpoint:
    """A job's state after a shard; parts of it are sections, named SECTION/NAME in `tensors`."""

    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)  # JSON values

    @classmethod
    def of_sections(cls, **sections: Checkpoint) -> Checkpoint:
        """Return one checkpoint of several, each under its name."""
        tensors = {
            f"{section}/{name}": tensor
            for section, part in sections.items()
            for name, tensor in part.tensors.items()
        }
        return cls(tensors, {section: part.facts for section, part in sections.items()})

    def section(self, name: str) -> Checkpoint:
        """Return one of the parts that `of_sections` joined."""
        prefix = f"{name}/"
        tensors = {
            key.removeprefix(prefix): tensor
            for key, tensor in self.tensors.items()
            if key.startswith(prefix)
        }
        return Checkpoint(tensors, self.facts[name])

    def to(self, device: torch.device) -> Checkpoint:
        """Return the checkpoint with its tensors on a device."""
        moved = {name: tensor.to(device) for name, tensor in self.tensors.items()}
        return Checkpoint(moved, self.facts)


class Checkpoints(Protocol):
    """Where a job's state is kept, so that another process can go on from it."""

    def due(self) -> bool:
        """Return whether it is time to write one."""

    def write(self, checkpoint: Checkpoint) -> None:
        """Keep this state, its tensors in their order, in place of the one before.

        The tensors are to be copied or written out: the job goes on adding to them.
        """

    def read(self) -> Checkpoint | None:
        """Return what an earlier run of the same job wrote last; None if it wrote nothing."""


class NoCheckpoints:
    """None is ever written."""

    def due(self) -> bool:
        """Never."""
        return False

    def write(self, checkpoint: Checkpoint) -> None:
        """Do nothing."""

    def read(self) -> None:
        """There is none."""
        return
