"""The first pass: every shard through the model once, zᵢ = f(xᵢ; θ), in order.

Every shard builds its graph. A graph is kept for the replay if the budget has room for it, and the
last shard's in any case: its backward pass comes next, when nothing else is held. All others are
freed at once. That every shard builds one is on purpose: without a graph torch may take kernels
that round otherwise, and what a job returns would depend on how much it could keep.

Cost: n forwards. Memory beyond the model: Z, the changing buffers n + 1 times, the kept graphs and
one more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Protocol

from gradbox_engine.model.calling.calls import ShardGraph
from gradbox_engine.model.calling.shard_feed import Position
from gradbox_engine.model.prepared import Prepared
from gradbox_engine.model.state.buffers import Snapshot
from gradbox_engine.replay.output_blocks import OutputBlocks
from gradbox_engine.replay.retention import GraphBudget
from gradbox_engine.replay.saved_tensors import GraphSizes
from gradbox_engine.replay.shard_record import ShardRecord
from gradbox_engine.requests import Observer


class FirstCall(Protocol):
    """Puts one shard through the model."""

    def __call__(self, position: Position, before: Snapshot, *, is_last: bool) -> ShardRecord:
        """Return the shard's record; `before` is also in the place of what comes after."""


def first_pass(
    prepared: Prepared,
    positions: Sequence[Position],
    records: list[ShardRecord],
    call: FirstCall,
    *,
    observer: Observer,
    after_shard: Callable[[Sequence[ShardRecord]], None] = lambda _records: None,
) -> None:
    """Put a range of shards through the model, in order, and append a record of each.

    Where a call raises, the records of the shards before it stay, and another first pass of the
    same shards goes on behind them.

    Args:
        records: of the first of these shards, which were put through before.
        after_shard: called with the records so far.

    Raises:
        EngineError: a call failed, or a registered buffer was overwritten by a graph.
        torch.OutOfMemoryError: one shard's graph does not fit beside those that are kept.
    """
    state = records[-1].after if records else prepared.buffers.first
    prepared.buffers.restore(state)
    for position, following in pairwise([*positions[len(records) :], None]):
        assert position is not None
        observer.step("forward", len(records), len(positions))
        record = call(position, state, is_last=following is None)
        record.after = state = prepared.buffers.advance(state)
        records.append(record)
        after_shard(records)
        prepared.feed.prefetch(following)
    observer.step("forward", len(positions), len(positions))


class GraphCalls:
    """The first calls of shards whose graphs are kept where there is room."""

    def __init__(
        self,
        prepared: Prepared,
        num_shards: int,
        *,
        budget: GraphBudget,
        outlives_the_job: bool = False,
    ) -> None:
        """Call nothing yet.

        Args:
            num_shards: how many there are.
            budget: how much of the graphs may be kept.
            outlives_the_job: whether the kept graphs are for a later job, before which the model
                is put back. The last shard's then counts like any other.
        """
        self._prepared = prepared
        self._budget = budget
        self._outlives_the_job = outlives_the_job
        self._sizes = GraphSizes(prepared, outlive_the_job=outlives_the_job)
        self._blocks = OutputBlocks(num_shards)

    def __call__(self, position: Position, before: Snapshot, *, is_last: bool) -> ShardRecord:
        """Put one shard through, and keep its graph if there is room."""
        comes_next = is_last and not self._outlives_the_job
        if comes_next or not self._budget.has_room():
            graph, num_bytes, kept = self._graph(position), 0, comes_next
        else:
            counted = self._sizes.counted(position, self._prepared.feed.take(position))
            if counted is None:  # cannot be counted, so no graph of this model is kept
                self._budget.exhaust()
                self._prepared.buffers.restore(before)
                graph, num_bytes, kept = self._graph(position), 0, False
            else:
                graph, num_bytes = counted
                kept = self._budget.admit(num_bytes)
        kept = kept and graph.intact
        if graph.recomputed and self._outlives_the_job:  # whose blocks may find another model then
            kept = False
        return ShardRecord(
            position,
            outputs=self._blocks.copy(graph.outputs),
            penalties=graph.penalties,
            before=before,
            after=before,
            graph=graph if kept else None,
            num_bytes=num_bytes,
        )

    def _graph(self, position: Position) -> ShardGraph:
        arguments = self._prepared.feed.take(position)
        return self._prepared.calls(position, arguments, with_penalties=True)
