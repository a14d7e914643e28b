"""Whether a range's shards are what they would be in one pass over all shards of the job.

Every range but the first begins with the registered buffers, on a model that has not seen the
shards before. That is right for a model whose outputs do not depend on those. It is not taken for
granted: the range's first shard is put through the model once more, under the buffers that one pass
would have shown it, and has to give the z of the range's first pass and the statistics that
`norm_statistics` predicts. A model that reads running statistics of batch norm in training mode, a
batch norm of another update rule, a counter in an object, a cache, a generator of its own: all of
them fail here, where a job on one device may well be right.

Cost: one forward. Not noticed: a dependence that this one shard does not show.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from gradbox_engine.errors import CoupledShards
from gradbox_engine.model.calling.outputs import Outputs
from gradbox_engine.model.comparison import relative_difference
from gradbox_engine.model.precision import replay_tolerance
from gradbox_engine.model.prepared import Prepared
from gradbox_engine.ranges.norm_statistics import (
    MEAN,
    ONE_DEVICE,
    VAR,
    after,
    statistics_of,
    with_statistics,
)
from gradbox_engine.ranges.protocol import NormStatistics, NormUpdate, RangeCotangents
from gradbox_engine.replay.shard_record import ShardRecord


def check_independence(
    ready: Prepared,
    record: ShardRecord,
    norms: Mapping[str, NormStatistics],
    updates: Mapping[str, NormUpdate],
    *,
    expected: Outputs | None = None,
    compared: Callable[[Outputs], Outputs] = lambda outputs: outputs,
) -> None:
    """Put one shard through the model under the statistics that one pass would have shown it.

    Args:
        record: the first of a range.
        norms: those statistics, where they are not the registered ones.
        updates: what the shard did to its batch norms in the first pass.
        expected: what was kept of z; the record's outputs by default.
        compared: makes the same of the z that it gives now.

    Raises:
        CoupledShards: it gives another z, or other statistics than its update predicts.
    """
    start = with_statistics(record.before, norms)
    ready.buffers.restore(start)
    graph = ready.calls(record.position, ready.feed.take(record.position))
    where = ready.calls.where(record.position)
    suspected = f"{next(iter(norms))}.{MEAN}" if norms else ""
    outputs = compared({name: z.detach() for name, z in graph.outputs.items()})
    for name, z in (record.outputs if expected is None else expected).items():
        again = outputs.get(name, z.new_empty(0))
        if _moved(ready, again, z):
            raise CoupledShards(
                f"{where}: expected its output not to depend on the shards before it, but it is "
                f"another one under the state that they leave"
                f"{f' (in buffer {suspected!r}, among others)' if norms else ''}; {ONE_DEVICE}",
                name=suspected,
            )
    made = ready.buffers.advance(start).values
    for name in updates.keys() & norms.keys():
        predicted = after(norms[name], updates[name], module=name)
        now = statistics_of(made, name)
        mean_moved = _moved(ready, now.mean, predicted.mean)
        if mean_moved or _moved(ready, now.var, predicted.var):
            buffer = f"{name}.{MEAN if mean_moved else VAR}"
            raise CoupledShards(
                f"{where}: expected buffer {buffer!r} to follow batch norm's update rule, "
                f"s ← (1 − momentum) s + momentum x, but it does not; {ONE_DEVICE}",
                name=buffer,
            )


def compared_by_replay(record: ShardRecord, cotangents: RangeCotangents) -> bool:
    """Return whether the replay of a range's first shard makes this check, where no norm moves.

    It runs the shard once more under the buffers that the range began with, as this check does. But
    it restores attributes, what lies inside them, hooks and submodules, so it does not show what
    comes of one that the shard changed.
    """
    return record.position in cotangents.needed and not record.after.beyond


def _moved(ready: Prepared, again: Tensor, expected: Tensor) -> bool:
    tolerance = replay_tolerance(ready.options.precision, expected.dtype)
    with torch.no_grad():
        return float(relative_difference(again, expected)) > tolerance
