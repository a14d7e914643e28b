"""The checkpoint of a job that goes over its shards twice.

    after shard i of the first pass     z and penalties of the shards so far, and S₀ … Sᵢ₊₁
    after shard i of the second pass    these of all shards, the sums of gradients, and how far the
                                        pass has come

The cotangents are not in it, for they are a function of Z. Kept graphs are lost: their shards are
replayed, with the same bits on a CPU, so the result is that of an undisturbed job to the last bit.

Of Sᵢ it has the numbers of the registered buffers: none is written of a job whose shards changed
anything else, an attribute, say, or a buffer that is bound anew. What a model keeps beyond Sᵢ is
lost with the process. So a job that goes on in the first pass begins with the last shard that was
done: it has to give its z again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from gradbox_engine.checkpoint import Checkpoint, Checkpoints, NoCheckpoints
from gradbox_engine.model.calling.outputs import Outputs
from gradbox_engine.model.calling.shard_feed import Position
from gradbox_engine.model.comparison import ReplayComparison
from gradbox_engine.model.prepared import Prepared
from gradbox_engine.model.state.buffers import Buffers, packed, unpacked
from gradbox_engine.replay.shard_record import ShardRecord


class Sums(Protocol):
    """What the shards' gradients are added to."""

    def state(self) -> Checkpoint:
        """Return the sums, for another process."""

    def resume(self, state: Checkpoint) -> None:
        """Go on from a `state` of another process."""


class SecondPass(Protocol):
    """How far a second pass has come.

    Attributes:
        difference: the largest, see `comparison`.
    """

    difference: float

    @property
    def num_retained(self) -> int:
        """Shards that are done and whose graph was kept."""

    @property
    def num_replayed(self) -> int:
        """Shards that are done and went through the model once more."""

    @property
    def input_grads(self) -> dict[Position, dict[str, Tensor | None]]:
        """Gradients of inputs, by argument."""

    @property
    def fallbacks(self) -> dict[str, int]:
        """Shards by what stood in the way of forward mode, see `MixedResult`."""

    def state(self) -> Checkpoint:
        """Return all of it, for another process."""


@dataclass(frozen=True)
class Resumed:
    """What a checkpoint gave back: records of the first pass, and a `SecondPass.state`."""

    records: list[ShardRecord]
    second: Checkpoint | None = None


class JobCheckpoint:
    """Writes a job's state where its checkpoints are kept, when they are due, and reads it."""

    def __init__(
        self,
        kept: Checkpoints | None,
        ready: Prepared,
        sums: Sums,
        *,
        compared: Callable[[Outputs], Outputs] = lambda outputs: outputs,
    ) -> None:
        """Touch nothing yet.

        Args:
            compared: makes of a shard's outputs what its record has of them.
        """
        self._kept = kept or NoCheckpoints()
        self._ready = ready
        self._sums = sums
        self._compared = compared

    def after_first_call(self, records: Sequence[ShardRecord]) -> None:
        """Write the state after a shard of the first pass, if it is time."""
        if self._due(records):
            self._kept.write(Checkpoint.of_sections(**_packed_records(records)))

    def after_second_call(
        self, records: Sequence[ShardRecord], second: SecondPass, comparison: ReplayComparison
    ) -> None:
        """Write the state after a shard of the second pass, if it is time.

        Raises:
            ReplayMismatch: one of the shards so far differs from its first pass; no other process
                would compare them again.
        """
        if self._due(records):
            second.difference = comparison.finish()
            sections = _packed_records(records)
            sections |= {"sums": self._sums.state(), "second": second.state()}
            self._kept.write(Checkpoint.of_sections(**sections))

    def resumed(self) -> Resumed:
        """Return the state to begin with, and give the sums what they had.

        Raises:
            ReplayMismatch: a shard that was done does not repeat its z in this process.
        """
        written = self._kept.read()
        if written is None:
            return Resumed([])
        written = written.to(self._ready.device)
        records = _unpacked_records(written, self._ready.buffers)
        if "second" not in written.facts:
            self._check_repeats(records[-1])
            return Resumed(records)
        self._sums.resume(written.section("sums"))
        return Resumed(records, written.section("second"))

    def _due(self, records: Sequence[ShardRecord]) -> bool:
        return self._kept.due() and not any(record.after.beyond for record in records)

    def _check_repeats(self, record: ShardRecord) -> None:
        """Put a shard through the model once more and compare what its record has of z."""
        ready = self._ready
        ready.buffers.restore(record.before)
        graph = ready.calls(record.position, ready.feed.take(record.position))
        again = self._compared(graph.outputs)
        comparison = ReplayComparison(ready.options.precision)
        first = {name: z for name, z in record.outputs.items() if name in again}
        comparison.compare(ready.calls.where(record.position), again, first)
        comparison.finish()


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


def _unpacked_records(written: Checkpoint, buffers: Buffers) -> list[ShardRecord]:
    of_records = written.section("records")
    states = unpacked(written.section("buffers"), buffers.first)
    outputs: dict[int, dict[str, Tensor]] = {}
    for key, tensor in of_records.tensors.items():
        kind, index, name = key.split("/", 2)
        if kind == "z":
            outputs.setdefault(int(index), {})[name] = tensor
    return [
        ShardRecord(
            Position(group, shard),
            outputs[index],
            [of_records.tensors[f"penalties/{index}/{number}"] for number in range(num_penalties)],
            before=states[index],
            after=states[index + 1],
        )
        for index, (group, shard, num_penalties) in enumerate(of_records.facts["shards"])
    ]
