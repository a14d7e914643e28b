"""The checkpoint of a job that goes over its shards twice.

    after shard i of the first pass     z and penalties of the shards so far, and S₀ … Sᵢ₊₁
    after shard i of the second pass    these of all shards, the sums of gradients, and how far the
                                        pass has come

The cotangents are not in it, for they are a function of Z. Kept graphs are lost: their shards are
replayed, with the same bits on a CPU, so the result is that of an undisturbed job to the last bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from gradbox_engine.checkpoint import Checkpoint, Checkpoints, NoCheckpoints
from gradbox_engine.model.prepared import Prepared
from gradbox_engine.model.shard_feed import Position
from gradbox_engine.model.snapshots import Snapshot, packed, unpacked
from gradbox_engine.replay.comparison import ReplayComparison
from gradbox_engine.replay.shard_record import ShardRecord


class Sums(Protocol):
    """What the shards' gradients are added to."""

    def state(self) -> Checkpoint:
        """Return the sums, for another process."""

    def resume(self, found: Checkpoint) -> None:
        """Go on from a `state` of another process."""


class SecondPass(Protocol):
    """How far a second pass has come."""

    difference: float  # the largest, see `comparison`

    def state(self) -> Checkpoint:
        """Return all of it, for another process."""


@dataclass(frozen=True)
class Resumed:
    """What a checkpoint gave back: records of the first pass, and a `SecondPass.state`."""

    records: list[ShardRecord]
    second: Checkpoint | None = None


class JobCheckpoint:
    """Writes a job's state where its checkpoints are kept, when they are due, and reads it."""

    def __init__(self, kept: Checkpoints | None, ready: Prepared, sums: Sums) -> None:
        self._kept = kept or NoCheckpoints()
        self._ready = ready
        self._sums = sums

    def after_first_call(self, records: Sequence[ShardRecord]) -> None:
        """Write the state after a shard of the first pass, if it is time."""
        if self._kept.due():
            self._kept.write(Checkpoint.of_sections(**_packed_records(records)))

    def after_second_call(
        self, records: Sequence[ShardRecord], second: SecondPass, comparison: ReplayComparison
    ) -> None:
        """Write the state after a shard of the second pass, if it is time.

        Raises:
            ReplayMismatch: one of the shards so far differs from its first pass; no other process
                would compare them again.
        """
        if self._kept.due():
            second.difference = comparison.finish()
            sections = _packed_records(records)
            sections |= {"sums": self._sums.state(), "second": second.state()}
            self._kept.write(Checkpoint.of_sections(**sections))

    def resumed(self) -> Resumed:
        """Return the state to begin with, and give the sums what they had."""
        found = self._kept.read()
        if found is None:
            return Resumed([])
        found = found.to(self._ready.device)
        records = _unpacked_records(found, self._ready.buffers.first)
        if "second" not in found:
            return Resumed(records)
        self._sums.resume(found.section("sums"))
        return Resumed(records, found.section("second"))


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
