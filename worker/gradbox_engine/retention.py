"""Which shards' graphs are kept from the first pass, so that they need no replay.

With everything kept a job costs one forward and one backward of every shard, with nothing kept a
forward more; between, the cost is linear in the number of shards that are kept.

The budget is in bytes of memory. A shard's graph takes about HELD_FACTOR times the bytes of its
saved tensors: the rest is nodes, rounding by the allocator, and what custom functions keep aside.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Literal

import torch

from gradbox_engine.saved_tensors import SavedTensors

Retain = int | Literal["auto"]

HELD_FACTOR = 1.3
CUDA_RESERVE = 0.1
HOST_RESERVE = 0.5
"""Parts of what is free that "auto" leaves alone. On the host it leaves more: there other programs
share the memory, and running out ends the process instead of raising."""

MEMINFO = Path("/proc/meminfo")
CGROUP = Path("/sys/fs/cgroup")
CGROUP_FILES = (
    ("memory.max", "memory.current", "memory.stat", "inactive_file"),
    (
        "memory/memory.limit_in_bytes",
        "memory/memory.usage_in_bytes",
        "memory/memory.stat",
        "total_inactive_file",
    ),
)
"""Limit, use, statistics and what of the use is cached files, in versions 2 and 1."""


class GraphBudget:
    """Decides, shard by shard, whether the next graph may be kept.

    `unmeasured` is set once the model turns out to differentiate in its own forward pass: such
    graphs can be neither emptied nor measured, and only the last shard's is kept.
    """

    def __init__(self, total_bytes: float, *, with_headroom: bool = False) -> None:
        """Begin with nothing held.

        Args:
            total_bytes: memory that kept graphs may take.
            with_headroom: whether one more shard's graph, that of the replay running beside
                them, comes out of the same memory.
        """
        self._total_bytes = total_bytes
        self._with_headroom = with_headroom
        self._held_bytes = 0
        self._latest_bytes = 0
        self.unmeasured = False

    def room_bytes(self) -> float:
        """Return how many bytes of saved tensors the next shard may keep; 0 for none at all."""
        free_bytes = self._total_bytes / HELD_FACTOR - self._held_bytes
        if self._with_headroom:
            free_bytes -= self._latest_bytes
        # As large as the shard before, most likely: not worth beginning to keep what will not fit.
        return free_bytes if free_bytes > 0 and free_bytes >= self._latest_bytes else 0

    def count(self, saved: SavedTensors) -> None:
        """Take note of what a shard has kept, or of how far it came before it was too much."""
        self._latest_bytes = max(saved.num_bytes, 1)
        if saved.kept:
            self._held_bytes += saved.num_bytes

    def exhaust(self) -> None:
        """Keep nothing from here on."""
        self._total_bytes = 0


def graph_budget(retain: Retain, device: torch.device, *, sums_bytes: int) -> GraphBudget:
    """Return the budget that `retain` stands for on a device.

    Args:
        sums_bytes: what the sums of gradients will take, which "auto" leaves free.
    """
    if retain == "auto":
        return GraphBudget(max(0, _free_bytes(device) - sums_bytes), with_headroom=True)
    return GraphBudget(retain)


def _free_bytes(device: torch.device) -> float:
    """Return what is free on the device less a reserve; 0 where that cannot be known."""
    if device.type == "cuda":
        free_bytes, _ = torch.cuda.mem_get_info(device)
        cached_bytes = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return (free_bytes + cached_bytes) * (1 - CUDA_RESERVE)
    if device.type == "cpu":
        return min(_available_bytes(), _cgroup_bytes()) * (1 - HOST_RESERVE)
    return 0


def _available_bytes() -> float:
    try:
        lines = MEMINFO.read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))


def _cgroup_bytes() -> float:
    """Return what the process's control group (Linux) still admits; infinite without a limit."""
    for limit_file, used_file, statistics_file, files_field in CGROUP_FILES:
        try:
            limit = (CGROUP / limit_file).read_text().strip()
            used_bytes = int((CGROUP / used_file).read_text())
            statistics = (CGROUP / statistics_file).read_text().splitlines()
        except OSError:
            continue
        if limit == "max":
            return math.inf
        fields = dict(line.split() for line in statistics)
        return max(0, int(limit) - used_bytes + int(fields.get(files_field, 0)))
    return math.inf
