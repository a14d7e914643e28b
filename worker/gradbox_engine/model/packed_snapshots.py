"""The buffers before the first shard and after each, as a part of a checkpoint.

Of each snapshot only what differs from the one before is in it. The first is not: it is the
model's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from gradbox_engine.checkpoint import Checkpoint
from gradbox_engine.model.snapshots import Slot, Snapshot


def packed(states: Sequence[Snapshot]) -> Checkpoint:
    """Return what makes S₁ … Sₙ of S₀."""
    slots: dict[Slot, int] = {}
    gone: list[list[int]] = []
    none: list[list[int]] = []
    changed: dict[str, Tensor] = {}
    before: Mapping[Slot, Tensor | None] = states[0].values
    for index, snapshot in enumerate(states[1:]):
        values = snapshot.values
        for slot, value in values.items():
            if slot in before and before[slot] is value:
                continue
            number = slots.setdefault(slot, len(slots))
            if value is None:
                none.append([index, number])
            else:
                changed[f"{index}/{number}"] = value
        gone += [[index, slots.setdefault(s, len(slots))] for s in before if s not in values]
        before = values
    facts: dict[str, Any] = {"slots": [list(slot) for slot in slots], "gone": gone, "none": none}
    return Checkpoint(changed, facts | {"num": len(states) - 1})


def unpacked(found: Checkpoint, first: Snapshot) -> list[Snapshot]:
    """Return S₀ … Sₙ, S₀ being `first`."""
    slots = [(module, name) for module, name in found.facts["slots"]]
    changes: dict[int, dict[Slot, Tensor | None]] = {}
    for key, value in found.tensors.items():
        index, number = map(int, key.split("/"))
        changes.setdefault(index, {})[slots[number]] = value
    for index, number in found.facts["none"]:
        changes.setdefault(index, {})[slots[number]] = None
    gone: dict[int, set[Slot]] = {}
    for index, number in found.facts["gone"]:
        gone.setdefault(index, set()).add(slots[number])
    states, values = [first], dict(first.values)
    for index in range(found.facts["num"]):
        values = {
            slot: value
            for slot, value in (values | changes.get(index, {})).items()
            if slot not in gone.get(index, ())
        }
        states.append(Snapshot(dict(values), versions={}))
    return states
