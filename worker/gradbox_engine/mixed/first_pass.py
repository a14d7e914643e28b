"""The first pass of a mixed gradient: vᵢ, aᵢ and dfdzᵢ of every shard, through its own graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise

from gradbox_engine.errors import BadInputs
from gradbox_engine.mixed.prepared import PreparedMixed
from gradbox_engine.model.calling.outputs import Outputs
from gradbox_engine.model.calling.shard_feed import Position
from gradbox_engine.replay.shard_record import ShardRecord

SKETCH_ENTRIES = 4096
"""How many entries of v are kept of each shard and output, at equal distances, to compare with."""

DFDZ = "dfdz"
"""What dfdz_i is called in a shard's record, beside the entries of v."""


def first_pass(
    job: PreparedMixed,
    done: Sequence[ShardRecord],
    *,
    shards: Sequence[int] | None = None,
    after_shard: Callable[[Sequence[ShardRecord]], None] = lambda _records: None,
) -> list[ShardRecord]:
    """Take v, a and dfdz of every shard, in order, each through its own graph.

    Args:
        done: what an earlier process did of it.
        shards: consecutive ones; None takes all.
        after_shard: called with the records so far.
    """
    if shards is None:
        shards = range(len(job.ready.calls.groups[0].shards))
    observer, num_shards = job.observer, len(shards)
    buffers = job.ready.buffers
    before = done[-1].after if done else buffers.first
    buffers.restore(before)
    records = list(done)
    for shard, following in pairwise([*shards[len(done) :], None]):
        assert shard is not None
        observer.step("forward", len(records), num_shards)
        position = Position(0, shard)
        cotangents = partial(job.inner.cotangents, position)
        outputs, dfdz = job.jacobians.transposed(position, cotangents)
        after = buffers.advance(before)
        kept = {**sketch(outputs), DFDZ: dfdz}
        records.append(ShardRecord(position, kept, penalties=[], before=before, after=after))
        _check_alike(job, records[0], records[-1])
        before = after
        after_shard(records)
        job.ready.feed.prefetch(None if following is None else Position(0, following))
    observer.step("forward", num_shards, num_shards)
    return records


def sketch(outputs: Outputs) -> Outputs:
    """Return copies of some entries of each output: v may be much larger than z."""
    sketched = {}
    for name, value in outputs.items():
        flat = value.detach().flatten()
        sketched[f"v/{name}"] = flat[:: max(1, flat.numel() // SKETCH_ENTRIES)].clone()
    return sketched


def _check_alike(job: PreparedMixed, first: ShardRecord, record: ShardRecord) -> None:
    one, other = first.outputs[DFDZ], record.outputs[DFDZ]
    if one.shape[1:] != other.shape[1:] or one.dtype != other.dtype:
        raise BadInputs(
            f"{job.ready.calls.where(record.position)}: expected the z of all shards to have "
            f"one dtype and to differ in dim 0 alone, got {other.dtype} {tuple(other.shape)} after "
            f"{one.dtype} {tuple(one.shape)}; pad them to one shape"
        )
