"""The checkpoint of a set gradient, and of either of its halves.

    after shard i of the first pass    z and penalties of the shards so far, and S₀ … Sᵢ₊₁
    after shard i of the replay        these of all shards, the sums of gradients and their scale,
                                       the inputs' gradients, and how many shards have been added

The cotangents are not in it, for they are a function of Z. Kept graphs are lost: their shards are
replayed, with the same bits on a CPU, so the result is that of an undisturbed job to the last bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from gradbox_engine.checkpoint import Checkpoint, Checkpoints, NoCheckpoints
from gradbox_engine.model.packed_snapshots import packed, unpacked
from gradbox_engine.model.prepared import Prepared
from gradbox_engine.model.shard_feed import Position
from gradbox_engine.model.snapshots import Snapshot
from gradbox_engine.replay.comparison import ReplayComparison
from gradbox_engine.replay.gradient_sums import GradientSums
from gradbox_engine.replay.replay import ReplayProgress
from gradbox_engine.replay.shard_record import ShardRecord


@dataclass(frozen=True)
class Resumed:
    """What a checkpoint gave back: the shards that have been through the first pass, and more."""

    records: list[ShardRecord]
    replay: ReplayProgress | None = None


class JobCheckpoint:
    """Writes a job's state where its checkpoints are kept, when they are due, and reads it."""

    def __init__(self, kept: Checkpoints | None, ready: Prepared, sums: GradientSums) -> None:
        self._kept = kept or NoCheckpoints()
        self._ready = ready
        self._sums = sums

    def after_first_call(self, records: Sequence[ShardRecord]) -> None:
        """Write the state after a shard of the first pass, if it is time."""
        if self._kept.due():
            self._kept.write(Checkpoint.of_sections(**_packed_records(records)))

    def after_replay(
        self,
        records: Sequence[ShardRecord],
        progress: ReplayProgress,
        comparison: ReplayComparison,
    ) -> None:
        """Write the state after a shard of the replay, if it is time.

        Raises:
            ReplayMismatch: one of the shards so far differs from its first pass; no other process
                would compare them again.
        """
        if not self._kept.due():
            return
        progress.difference = comparison.finish()
        self._kept.write(
            Checkpoint.of_sections(
                **_packed_records(records),
                sums=Checkpoint(self._sums.reached(), {"scale": self._sums.scale}),
                replay=_packed_progress(progress),
            )
        )

    def resumed(self) -> Resumed:
        """Return the state to begin with, and give the sums what they had."""
        found = self._kept.read()
        if found is None:
            return Resumed([])
        found = found.to(self._ready.device)
        records = _unpacked_records(found, self._ready.buffers.first)
        if "replay" not in found:
            return Resumed(records)
        sums = found.section("sums")
        self._sums.resume(sums.tensors, scale=sums.facts["scale"])
        return Resumed(records, _unpacked_progress(found.section("replay")))


def _packed_records(records: Sequence[ShardRecord]) -> dict[str, Checkpoint]:
    tensors: dict[str, Tensor] = {}
    for index, record in enumerate(records):
        for name, z in record.outputs.items():
            tensors[f"z/{index}/{name}"] = z
        for number, value in enumerate(record.penalties):
            tensors[f"penalties/{index}/{number}"] = value
    facts = {"shards": [[*record.position, len(record.penalties)] for record in records]}
    states = [records[0].before, *(record.after for record in records)]
    return {"records": Checkpoint(tensors, facts), "buffers": packed(states)}


def _unpacked_records(found: Checkpoint, first: Snapshot) -> list[ShardRecord]:
    told = found.section("records")
    states = unpacked(found.section("buffers"), first)
    outputs: dict[int, dict[str, Tensor]] = {}
    for key, tensor in told.tensors.items():
        kind, index, name = key.split("/", 2)
        if kind == "z":
            outputs.setdefault(int(index), {})[name] = tensor
    return [
        ShardRecord(
            Position(group, shard),
            outputs[index],
            [told.tensors[f"penalties/{index}/{number}"] for number in range(num_penalties)],
            before=states[index],
            after=states[index + 1],
        )
        for index, (group, shard, num_penalties) in enumerate(told.facts["shards"])
    ]


def _packed_progress(progress: ReplayProgress) -> Checkpoint:
    tensors: dict[str, Tensor] = {}
    without_gradient = []
    for position, named in progress.input_grads.items():
        for name, gradient in named.items():
            if gradient is None:
                without_gradient.append([*position, name])
            else:
                tensors[f"{position.group}/{position.shard}/{name}"] = gradient
    facts = {
        "done": progress.num_done,
        "retained": progress.num_retained,
        "difference": progress.difference,
        "without_gradient": without_gradient,
    }
    return Checkpoint(tensors, facts)


def _unpacked_progress(found: Checkpoint) -> ReplayProgress:
    progress = ReplayProgress(
        num_done=found.facts["done"],
        num_retained=found.facts["retained"],
        difference=found.facts["difference"],
    )
    for group, shard, name in found.facts["without_gradient"]:
        progress.input_grads.setdefault(Position(group, shard), {})[name] = None
    for key, gradient in found.tensors.items():
        group, shard, name = key.split("/", 2)
        named = progress.input_grads.setdefault(Position(int(group), int(shard)), {})
        named[name] = gradient
    return progress
