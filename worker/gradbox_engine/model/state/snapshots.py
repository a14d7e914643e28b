"""The values of a model's buffers at one moment.

Two snapshots share what did not change between them. Buffers that have once been seen to change are
packed into one flat tensor for each dtype, for a tensor takes more memory than a statistic.

A checkpoint has of each snapshot what differs from the one before, and nothing of the first, which
is the model's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors

from gradbox_engine.checkpoint import Checkpoint
from gradbox_engine.model.host_copy import HostCopy
from gradbox_engine.model.state.model_state import AS_REGISTERED, ModelState, State
from gradbox_engine.model.state.stated import from_stated, stated
from gradbox_engine.model.tensor_equality import same_values

Slot = tuple[str, str]
"""A submodule's name and the buffer's name in it."""

Live = dict[Slot, Tensor | None]


class PackedValues(NamedTuple):
    """The values of several buffers of one dtype and device in one flat tensor."""

    slots: tuple[Slot, ...]
    shapes: tuple[torch.Size, ...]
    flat: Tensor

    @classmethod
    def of(cls, buffers: Mapping[Slot, Tensor]) -> PackedValues:
        """Copy the values of buffers, one behind the other."""
        values = tuple(buffers.values())
        flat: Tensor = _flatten_dense_tensors(values)  # type: ignore[no-untyped-call]
        if len(values) == 1:
            flat = flat.clone()  # one alone comes as a view
        return cls(tuple(buffers), tuple(value.shape for value in values), flat)

    def items(self) -> Iterator[tuple[Slot, Tensor]]:
        """Return the buffers' values, as views."""
        pieces = self.flat.split([shape.numel() for shape in self.shapes])  # type: ignore[no-untyped-call]
        for slot, shape, piece in zip(self.slots, self.shapes, pieces, strict=True):
            yield slot, piece.view(shape)


class Snapshot:
    """The values of all buffers at one moment. Nothing writes to these tensors.

    `versions` are the registered tensors' version counters, where those were bound; `beyond` is
    what else differs from the registered model, None where that is to stay as it is; `carrying` are
    the buffers that had a graph then.
    """

    def __init__(
        self,
        apart: Live,
        packed: Sequence[PackedValues] = (),
        *,
        versions: Mapping[Slot, int],
        beyond: State | None = None,
        carrying: frozenset[Slot] = frozenset(),
    ) -> None:
        self.versions = versions
        self.beyond = beyond
        self.carrying = carrying
        self._apart = apart
        self._packed = packed
        self._previous: Snapshot | None = None
        self._compared: list[Slot] = []
        self._differs: HostCopy | None = None

    @property
    def values(self) -> Live:
        """All values by slot, those kept together as views."""
        return self._apart | dict(chain.from_iterable(p.items() for p in self._packed))

    def apart(self, slot: Slot) -> Tensor | None:
        """Return the value of a slot that is kept by itself; None if it is not."""
        return self._apart.get(slot)

    def equals(self, other: Snapshot) -> bool:
        """Return whether values are equal, NaN not, and what else is kept; waits for the device."""
        if not (self.beyond or AS_REGISTERED).equals(other.beyond or AS_REGISTERED):
            return False
        own, others = self.values, other.values
        return own.keys() == others.keys() and all(
            a is b or (a is not None and b is not None and same_values(a, b))
            for a, b in ((own[slot], others[slot]) for slot in own)
        )

    def compare_later(self, previous: Snapshot, slots: list[Slot]) -> None:
        """Begin to find out on the device which of `slots` are as they were in `previous`."""
        flags = [_differs(self._apart[slot], previous._apart[slot]) for slot in slots]
        self._previous, self._compared = previous, slots
        self._differs = HostCopy(torch.stack(flags))

    def share(self) -> list[Slot]:
        """Free what is the same as in the snapshot before, once that is known.

        Returns:
            What is not the same.
        """
        if self._differs is None or self._previous is None:
            return []
        differing = []
        for slot, differs in zip(self._compared, self._differs.value().tolist(), strict=True):
            if differs:
                differing.append(slot)
            else:
                self._apart[slot] = self._previous._apart[slot]
        self._previous = self._differs = None
        return differing


def packed(states: Sequence[Snapshot], model: ModelState) -> Checkpoint:
    """Return what makes S₁ … Sₙ of S₀, all of which has to be such as can be stated."""
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
    facts["beyond"] = [stated(model, s.beyond or AS_REGISTERED) for s in states[1:]]
    facts["carrying"] = [sorted(map(list, snapshot.carrying)) for snapshot in states[1:]]
    return Checkpoint(changed, facts | {"num": len(states) - 1})


def unpacked(found: Checkpoint, first: Snapshot, model: ModelState) -> list[Snapshot]:
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
        beyond = from_stated(model, found.facts["beyond"][index])
        carrying = frozenset((module, name) for module, name in found.facts["carrying"][index])
        states.append(Snapshot(dict(values), versions={}, beyond=beyond, carrying=carrying))
    return states


def _differs(a: Tensor | None, b: Tensor | None) -> Tensor:
    assert a is not None
    assert b is not None
    return (a != b).any()
