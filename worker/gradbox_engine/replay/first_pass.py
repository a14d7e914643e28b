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
from functools import partial
from itertools import pairwise

from gradbox_engine.model.calling.calls import ShardGraph
from gradbox_engine.model.calling.shard_feed import Position
from gradbox_engine.model.prepared import Prepared
from gradbox_engine.model.state.snapshots import Snapshot
from gradbox_engine.replay.output_blocks import OutputBlocks
from gradbox_engine.replay.retention import GraphBudget
from gradbox_engine.replay.saved_tensors import GraphSizes
from gradbox_engine.replay.shard_record import ShardRecord, retried_without_kept_graphs
from gradbox_engine.requests import Observer


def first_pass(
    prepared: Prepared,
    positions: Sequence[Position],
    done: Sequence[ShardRecord] = (),
    *,
    budget: GraphBudget,
    observer: Observer,
    outlives_the_job: bool = False,
    after_shard: Callable[[Sequence[ShardRecord]], None] = lambda _records: None,
) -> list[ShardRecord]:
    """Put a range of shards through the model, in order, and return a record of each.

    Args:
        done: records of the first of these shards, made by an earlier process.
        budget: how much of the graphs may be kept.
        outlives_the_job: whether the kept graphs are for a later job, before which the model is
            put back. The last shard's then counts like any other.
        after_shard: called with the records so far.

    Raises:
        EngineError: a call failed, or a registered buffer was overwritten by a graph.
        torch.OutOfMemoryError: one shard's graph does not fit.
    """
    records = list(done)
    sizes = GraphSizes(prepared, outlive_the_job=outlives_the_job)
    blocks = OutputBlocks(len(positions) - len(done))
    state = done[-1].after if done else prepared.buffers.first
    prepared.buffers.restore(state)
    for position, following in pairwise([*positions[len(done) :], None]):
        assert position is not None
        observer.step("forward", len(records), len(positions))
        call = partial(
            _call,
            prepared,
            position,
            before=state,
            budget=budget,
            sizes=sizes,
            blocks=blocks,
            is_last=following is None and not outlives_the_job,
        )
        record = retried_without_kept_graphs(
            call, records, undo=partial(_start_again, prepared, state, budget)
        )
        record.after = state = prepared.buffers.advance(state)
        if prepared.buffers.outdates_older_graphs:
            for older in records:
                older.free_graph()
        records.append(record)
        after_shard(records)
        prepared.feed.prefetch(following)
    observer.step("forward", len(positions), len(positions))
    return records


def _call(
    prepared: Prepared,
    position: Position,
    *,
    before: Snapshot,
    budget: GraphBudget,
    sizes: GraphSizes,
    blocks: OutputBlocks,
    is_last: bool,
) -> ShardRecord:
    """Put one shard through, and keep its graph if there is room."""

    def call() -> ShardGraph:
        return prepared.calls(position, prepared.feed.take(position), with_penalties=True)

    if is_last or not budget.has_room():
        graph, num_bytes, kept = call(), 0, is_last
    else:
        found = sizes.counted(position, prepared.feed.take(position))
        if found is None:  # cannot be counted, so no graph of this model is kept
            _start_again(prepared, before, budget)
            graph, num_bytes, kept = call(), 0, False
        else:
            graph, num_bytes = found
            kept = budget.admit(num_bytes)
    kept = kept and graph.intact
    return ShardRecord(
        position,
        outputs=blocks.copy(graph.outputs),
        penalties=graph.penalties,
        before=before,
        after=before,
        graph=graph if kept else None,
        num_bytes=num_bytes,
    )


def _start_again(prepared: Prepared, before: Snapshot, budget: GraphBudget) -> None:
    """Make ready to call the model on a shard once more, keeping no graph from here on."""
    budget.exhaust()
    prepared.buffers.restore(before)
