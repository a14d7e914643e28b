"""dt/dy, added up over shards in their order."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from gradbox_engine.checkpoint import Checkpoint
from gradbox_engine.model.precision import accumulation_dtype


class LeafSums:
    """One sum for each leaf, in float32 or wider."""

    def __init__(self, leaves: Mapping[str, Tensor]) -> None:
        """Begin with zeros, of the width that the leaves have during the job."""
        self._sums = {
            name: torch.zeros_like(leaf.detach(), dtype=accumulation_dtype(leaf.dtype))
            for name, leaf in leaves.items()
        }
        self._reached: set[str] = set()

    @torch.no_grad()
    def add(self, gradients: Mapping[str, Tensor]) -> None:
        """Add one shard's gradients, which are those of the leaves that a path leads to."""
        for name, gradient in gradients.items():
            self._sums[name].add_(gradient)
            self._reached.add(name)

    def state(self) -> Checkpoint:
        """Return the sums, for another process."""
        return Checkpoint(self._sums, {"reached": sorted(self._reached)})

    def resume(self, state: Checkpoint) -> None:
        """Go on from a `state` of another process."""
        self._sums = dict(state.tensors)
        self._reached = set(state.facts["reached"])

    def clear(self) -> None:
        """Forget what was added."""
        for total in self._sums.values():
            total.zero_()
        self._reached.clear()

    def reached(self) -> dict[str, Tensor]:
        """Return the sums of the leaves that a gradient has reached, in the leaves' order."""
        return {name: total for name, total in self._sums.items() if name in self._reached}
