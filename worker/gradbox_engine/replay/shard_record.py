"""What a job has at hand while its shards go through the model, and what it notes of each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from gradbox_engine.model.buffers import Buffers, Statistics
from gradbox_engine.model.calls import ModelCalls, Passage
from gradbox_engine.model.outputs import Outputs
from gradbox_engine.model.restore import Preserved
from gradbox_engine.model.shard_feed import Feed, Position
from gradbox_engine.model.snapshots import Snapshot
from gradbox_engine.replay.retention import Form
from gradbox_engine.replay.ungraphed import Ungraphed

T = TypeVar("T")


@dataclass(frozen=True)
class Prepared:
    """A model made ready for one job, and the ways to put shards through it."""

    calls: ModelCalls
    feed: Feed
    buffers: Buffers
    inputs: Mapping[str, Sequence[str]]  # by group, the arguments whose gradients are wanted
    device: torch.device
    parameter_storages: frozenset[int]  # addresses
    ungraphed: Ungraphed
    preserved: Preserved
    graph_bytes: dict[Form, int] | None  # from earlier jobs, where those had graphs like these


@dataclass(slots=True)
class ShardRecord:
    """What the first pass leaves of a shard.

    `outputs` are z without a graph, `penalties` the penalties' values, `before` the buffers at its
    beginning; None where the shards before it changed nothing but statistics of batch norms.
    `passage` is there while its graph is kept, which has `num_bytes` of saved tensors; if it is
    `guarded`, those of buffers are copies, but for statistics: `after` are those at its end, if it
    was kept. `ended` are all buffers there, where more than statistics changes: a graph may read
    them on its way back, as a checkpointed block does. `graphed` says whether there was a graph
    at all.
    """

    position: Position
    outputs: Outputs
    penalties: list[Tensor]
    before: Snapshot | None
    passage: Passage | None = None
    num_bytes: int = 0
    guarded: bool = True
    after: Statistics | None = None
    ended: Snapshot | None = None
    graphed: bool = True

    @property
    def kept(self) -> bool:
        """Whether a backward pass can begin from here without a replay."""
        return self.passage is not None

    def drop(self) -> None:
        """Let go of the graph."""
        self.passage, self.num_bytes = None, 0


def with_room(
    attempt: Callable[[], T],
    records: Sequence[ShardRecord],
    undo: Callable[[], None] = lambda: None,
) -> T:
    """Run an attempt; where memory runs out while graphs are kept, drop them and run it again.

    Raises:
        torch.OutOfMemoryError: it runs out with nothing kept, too.
    """
    try:
        return attempt()
    except torch.OutOfMemoryError:
        if not any(record.kept for record in records):
            raise
    # Outside the handler, for its traceback holds on to the failed attempt's tensors.
    for record in records:
        record.drop()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    undo()
    return attempt()
