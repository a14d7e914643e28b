"""Which shards' graphs are kept from the first pass, so that they need no replay.

With everything kept a job costs one forward and one backward of every shard, with nothing kept a
forward more; between, the cost is linear in the number of shards that are kept.

The budget is in bytes of memory. A shard's graph takes about HELD_FACTOR times the bytes of its
saved tensors: the rest is nodes, rounding by the allocator, and what custom functions keep aside.
While a shard runs, its own graph is there beside the kept ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, Protocol

import torch

from gradbox_engine.host_memory import available_bytes
from gradbox_engine.requests import Retain

HELD_FACTOR = 1.3
CUDA_RESERVE = 0.1
HOST_RESERVE = 0.5
"""Parts of what is free that "auto" leaves alone. On the host it leaves more: there other programs
share the memory, and running out ends the process instead of raising."""


class OlderGraphs(Protocol):
    """Graphs of earlier passes, which give way to newer ones."""

    @property
    def num_bytes(self) -> float:
        """What they take, about; 0 once there are none."""

    @property
    def newest_bytes(self) -> int:
        """Saved tensors of the one that was kept last."""

    def free_oldest(self) -> None:
        """Free one of them, if there is any."""


class NoneOlder:
    """There are none."""

    num_bytes: Final = 0.0
    newest_bytes: Final = 0

    def free_oldest(self) -> None: ...


NONE_OLDER: Final = NoneOlder()


class GraphBudget:
    """Decides, shard by shard, whether a graph may be kept."""

    def __init__(
        self,
        total_bytes: float | Callable[[], float],
        *,
        with_headroom: bool = False,
        older: OlderGraphs = NONE_OLDER,
    ) -> None:
        """Begin with nothing held.

        Args:
            total_bytes: memory that kept graphs may take, beside the older ones; or what measures
                it, called before the first graph that may be kept. A job of one shard has none.
            with_headroom: whether one more shard's graph, that of the shard running beside
                them, comes out of the same memory.
            older: their memory is added as they have to go, one after the other.
        """
        self._measure = total_bytes if callable(total_bytes) else None
        self._total_bytes = 0.0 if callable(total_bytes) else total_bytes
        self._with_headroom = with_headroom
        self._older = older
        self._held_bytes = 0
        self._latest_bytes = 0

    def has_room(self) -> bool:
        """Return whether a graph as large as the one before fits; frees older ones for it."""
        while (before := self._older.num_bytes) and not self._fits(
            max(self._latest_bytes, self._older.newest_bytes)
        ):
            self._older.free_oldest()
            self._total_bytes += before - self._older.num_bytes
        return self._fits(self._latest_bytes)

    def admit(self, num_bytes: int) -> bool:
        """Return whether a graph is kept, given the bytes that it holds, and count it if it is."""
        self._latest_bytes = max(num_bytes, 1)
        if not self._fits(num_bytes):
            return False
        self._held_bytes += num_bytes
        return True

    def exhaust(self) -> None:
        """Keep nothing from here on."""
        self._total_bytes, self._measure, self._older = 0.0, None, NONE_OLDER

    def _fits(self, num_bytes: int) -> bool:
        if self._measure is not None:
            self._total_bytes, self._measure = self._measure(), None
        free_bytes = self._total_bytes / HELD_FACTOR - self._held_bytes
        needed_bytes = 2 * num_bytes if self._with_headroom else num_bytes
        return free_bytes > 0 and free_bytes >= needed_bytes


def graph_budget(
    retain: Retain,
    devices: Sequence[torch.device],
    *,
    sums_bytes: int,
    overlay_bytes: int = 0,
    older: OlderGraphs = NONE_OLDER,
) -> GraphBudget:
    """Return the budget that `retain` stands for.

    Args:
        devices: of the model. "auto" takes a graph to lie on all of them in equal parts, so that
            the one with the least free counts for each.
        sums_bytes: what the sums of gradients will take, which "auto" leaves free.
        overlay_bytes: what the graphs hold beside what they saved.
        older: graphs of earlier passes, whose memory comes out of the same budget.
    """
    if retain == "auto":
        taken_bytes = sums_bytes + overlay_bytes
        return GraphBudget(
            lambda: len(devices) * min(map(_free_bytes, devices)) - taken_bytes,
            with_headroom=True,
            older=older,
        )
    if retain == 0:
        return GraphBudget(0)
    total_bytes = retain - overlay_bytes - older.num_bytes
    return GraphBudget(total_bytes, older=older)


def _free_bytes(device: torch.device) -> float:
    """Return what is free on the device less a reserve; 0 where that cannot be known."""
    if device.type == "cuda":
        free_bytes, total_bytes = torch.cuda.mem_get_info(device)
        used_bytes = torch.cuda.memory_allocated(device)
        cached_bytes = torch.cuda.memory_reserved(device) - used_bytes
        most_bytes = torch.cuda.get_per_process_memory_fraction(device) * total_bytes
        left_bytes = min(free_bytes + cached_bytes, most_bytes - used_bytes)
        return left_bytes * (1 - CUDA_RESERVE)
    if device.type == "cpu":
        return available_bytes() * (1 - HOST_RESERVE)
    return 0
