"""What the first pass leaves of a shard."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from gradbox_engine.model.calling.blame import is_out_of_memory
from gradbox_engine.model.calling.calls import ShardGraph
from gradbox_engine.model.calling.outputs import Outputs
from gradbox_engine.model.calling.shard_feed import Position
from gradbox_engine.model.state.buffers import Snapshot
from gradbox_engine.model.state.model_state import AS_REGISTERED

T = TypeVar("T")


@dataclass(slots=True)
class ShardRecord:
    """A shard's outputs and buffers, and its graph for as long as that is kept."""

    position: Position
    outputs: Outputs  # z without a graph
    penalties: list[Tensor]  # their values, 0-dim
    before: Snapshot  # Sᵢ: the buffers before the shard
    after: Snapshot  # Sᵢ₊₁: the buffers after it
    graph: ShardGraph | None = None
    num_bytes: int = 0  # of the graph's saved tensors, where they were counted

    def free_graph(self) -> None:
        """Give the graph's memory back."""
        self.graph = None


def free_graphs(records: Iterable[ShardRecord], positions: Container[Position]) -> None:
    """Free the graphs of the shards at these positions."""
    for record in records:
        if record.position in positions:
            record.free_graph()


def any_changed_state(records: Iterable[ShardRecord]) -> bool:
    """Return whether any shard left other buffers, attributes or hooks than it found.

    The last shard may leave what the first one found: a flag that every second call sets.
    """
    return any(
        (record.after.beyond or AS_REGISTERED).kept or not record.after.same_buffers(record.before)
        for record in records
    )


def retried_in_less_memory(
    step: Callable[[], T],
    records: Callable[[], Sequence[ShardRecord]],
    *,
    recompute: Callable[[], bool],
    undo: Callable[[], None],
) -> T:
    """Run a step of the job; where memory runs out, repeat it in less for as long as that is there.

    First without kept graphs, then with the shard recomputed that did not fit.

    Args:
        records: returns those whose graphs are kept by then.
        recompute: has that shard recomputed; returns whether it was not before.
        undo: called before the step is repeated.

    Raises:
        torch.OutOfMemoryError: memory runs out all the same.
    """
    while True:
        try:
            return step()
        except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
            kept = any(record.graph for record in records())
            if not is_out_of_memory(error) or not (kept or recompute()):
                raise
        # Outside the handler, whose traceback holds on to the failed step's tensors.
        for record in records():
            record.free_graph()
        torch.cuda.empty_cache()
        undo()
