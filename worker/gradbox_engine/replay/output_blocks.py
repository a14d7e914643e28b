"""Copies of the shards' outputs, one behind the other in blocks of memory.

An allocation for each shard would leave holes on a host: between two copies lies the model's own z,
and glibc does not put an aligned tensor into a hole of exactly its size, nor gives the hole back
while something lies behind it. 1 GB of outputs of 1 MB took 3 GB so, most of it after the job, too.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from gradbox_engine.model.calling.outputs import Outputs

# glibc maps what is larger than 32 MiB by itself, and unmaps it when it is freed.
BLOCK_BYTES: Final = 64 * 2**20


class OutputBlocks:
    """Holds the copies of so many shards' outputs, as long as the copies live."""

    def __init__(self, num_shards: int) -> None:
        """Allocate nothing yet."""
        self._num_left = num_shards
        self._blocks: dict[tuple[str, torch.dtype], tuple[Tensor, int]] = {}
        """The newest one of each kind, and how many of its entries are taken."""

    def copy(self, outputs: Outputs) -> Outputs:
        """Return the next shard's outputs, without their graph."""
        copied = {name: self._copied(name, z.detach()) for name, z in outputs.items()}
        self._num_left -= 1
        return copied

    def _copied(self, name: str, z: Tensor) -> Tensor:
        key, needed = (name, z.dtype), z.numel()
        block, taken = self._blocks.get(key) or (z.new_empty(0), 0)
        if block.numel() - taken < needed or block.device != z.device:
            most = max(1, BLOCK_BYTES // max(1, z.nbytes))  # of shards like this one
            block, taken = z.new_empty(needed * min(self._num_left, most)), 0
        self._blocks[key] = block, taken + needed
        return block[taken : taken + needed].view(z.shape).copy_(z)
