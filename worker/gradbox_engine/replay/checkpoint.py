"""The state of a long job, from which another process goes on after a crash.

    after shard i of the first pass    z and penalties of the shards so far, and S₀ … Sᵢ₊₁
    after shard i of the replay        these of all shards, the sums of gradients, the inputs'
                                       gradients, and how many shards have been added

Random streams need nothing, for each shard's is derived from its numbers; the cotangents need
nothing, for they are a function of Z. Kept graphs are lost: their shards are replayed, with the
same bits on a CPU, so the result is that of an undisturbed job to the last bit.

Not kept: the replay of a job in fp16, whose scale may still change; it begins again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from gradbox_engine.model.prepared import Prepared
from gradbox_engine.model.shard_feed import Position
from gradbox_engine.model.snapshots import Slot, Snapshot
from gradbox_engine.replay.gradient_sums import GradientSums
from gradbox_engine.replay.replay import ReplayProgress
from gradbox_engine.replay.shard_record import ShardRecord
from gradbox_engine.requests import Checkpoints, NoCheckpoints

State = dict[str, Tensor]


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
            state, facts = _packed_records(records)
            self._kept.write(state, facts)

    def after_replay(self, records: Sequence[ShardRecord], progress: ReplayProgress) -> None:
        """Write the state after a shard of the replay, if it is time."""
        if self._ready.options.precision == "fp16" or not self._kept.due():
            return
        state, facts = _packed_records(records)
        state |= {f"sums/{name}": total for name, total in self._sums.reached().items()}
        state |= dict(_packed_input_grads(progress))
        facts["replay"] = {
            "done": progress.num_done,
            "retained": progress.num_retained,
            "difference": progress.difference,
            "without_gradient": [
                [*position, name]
                for position, named in progress.input_grads.items()
                for name, gradient in named.items()
                if gradient is None
            ],
        }
        self._kept.write(state, facts)

    def resumed(self) -> Resumed:
        """Return the state to begin with, and give the sums what they had."""
        found = self._kept.read()
        if found is None:
            return Resumed([])
        state = {name: tensor.to(self._ready.device) for name, tensor in found[0].items()}
        facts = found[1]
        records = _unpacked_records(state, facts, self._ready.buffers.first)
        replay: Mapping[str, Any] | None = facts.get("replay")
        if replay is None:
            return Resumed(records)
        self._sums.resume(dict(_section(state, "sums/")))
        progress = ReplayProgress(
            num_done=replay["done"],
            num_retained=replay["retained"],
            difference=replay["difference"],
        )
        for group, shard, name in replay["without_gradient"]:
            progress.input_grads.setdefault(Position(group, shard), {})[name] = None
        for key, gradient in _section(state, "input_grads/"):
            group, shard, name = key.split("/", 2)
            named = progress.input_grads.setdefault(Position(int(group), int(shard)), {})
            named[name] = gradient
        return Resumed(records, progress)


def _packed_records(records: Sequence[ShardRecord]) -> tuple[State, dict[str, Any]]:
    state: State = {}
    shards = []
    for index, record in enumerate(records):
        for name, z in record.outputs.items():
            state[f"z/{index}/{name}"] = z
        for number, value in enumerate(record.penalties):
            state[f"penalties/{index}/{number}"] = value
        shards.append([*record.position, len(record.penalties)])
    states = [records[0].before, *(record.after for record in records)]
    names, changed = _packed_buffers(states)
    return state | changed, {"shards": shards, **names}


def _packed_buffers(states: Sequence[Snapshot]) -> tuple[dict[str, Any], State]:
    """Return the values of buffers that are not those of the state before, and their names."""
    slots: dict[Slot, int] = {}
    gone: list[list[int]] = []
    none: list[list[int]] = []
    state: State = {}
    before: Mapping[Slot, Tensor | None] = states[0].values
    for index, snapshot in enumerate(states[1:], 1):
        values = snapshot.values
        for slot, value in values.items():
            if slot in before and before[slot] is value:
                continue
            number = slots.setdefault(slot, len(slots))
            if value is None:
                none.append([index, number])
            else:
                state[f"buffers/{index}/{number}"] = value
        gone += [[index, slots.setdefault(s, len(slots))] for s in before if s not in values]
        before = values
    return {"slots": [list(slot) for slot in slots], "gone": gone, "none": none}, state


def _unpacked_records(
    state: Mapping[str, Tensor], facts: Mapping[str, Any], first: Snapshot
) -> list[ShardRecord]:
    slots = [(module, name) for module, name in facts["slots"]]
    changes: dict[int, dict[Slot, Tensor | None]] = {}
    for key, value in _section(state, "buffers/"):
        index, number = map(int, key.split("/"))
        changes.setdefault(index, {})[slots[number]] = value
    for index, number in facts["none"]:
        changes.setdefault(index, {})[slots[number]] = None
    gone: dict[int, set[Slot]] = {}
    for index, number in facts["gone"]:
        gone.setdefault(index, set()).add(slots[number])
    outputs: dict[int, dict[str, Tensor]] = {}
    for key, z in _section(state, "z/"):
        place, _, name = key.partition("/")
        outputs.setdefault(int(place), {})[name] = z
    records = []
    before, values = first, dict(first.values)
    for index, (group, shard, num_penalties) in enumerate(facts["shards"]):
        values = {
            slot: value
            for slot, value in (values | changes.get(index + 1, {})).items()
            if slot not in gone.get(index + 1, ())
        }
        after = Snapshot(dict(values), versions={})
        penalties = [state[f"penalties/{index}/{number}"] for number in range(num_penalties)]
        records.append(
            ShardRecord(Position(group, shard), outputs[index], penalties, before, after)
        )
        before = after
    return records


def _packed_input_grads(progress: ReplayProgress) -> Iterator[tuple[str, Tensor]]:
    for position, named in progress.input_grads.items():
        for name, gradient in named.items():
            if gradient is not None:
                yield f"input_grads/{position.group}/{position.shard}/{name}", gradient


def _section(state: Mapping[str, Tensor], prefix: str) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in state.items():
        if name.startswith(prefix):
            yield name.removeprefix(prefix), tensor
