"""The values of a model's buffers at one moment.

Two snapshots share what did not change between them. Buffers that have once been seen to change are
kept together, in one tensor for each dtype, for a tensor takes more memory than a statistic.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from gradbox_engine.model.flat import Layout
from gradbox_engine.model.host_copy import Arrival
from gradbox_engine.model.tensor_equality import same_values

Slot = tuple[str, str]
"""A submodule's name and the buffer's name in it."""

Live = dict[Slot, Tensor | None]


class Packed(NamedTuple):
    """Several buffers' values of one kind in one flat tensor."""

    slots: tuple[Slot, ...]
    layout: Layout
    flat: Tensor


class Snapshot:
    """The values of all buffers at one moment. Nothing writes to these tensors."""

    def __init__(self, apart: Live, packed: Sequence[Packed] = ()) -> None:
        self._apart = apart
        self._packed = packed
        self._previous: Snapshot | None = None
        self._compared: list[Slot] = []
        self._changed: Arrival | None = None

    @property
    def values(self) -> Live:
        """All values by slot, those kept together as views."""
        together = (zip(p.slots, p.layout.parts(p.flat), strict=True) for p in self._packed)
        return self._apart | dict(chain.from_iterable(together))

    def apart(self, slot: Slot) -> Tensor | None:
        """Return the value of a slot that is kept by itself; None if it is not."""
        return self._apart.get(slot)

    def same_bits(self, other: Snapshot) -> bool:
        """Return whether all values are equal; NaN is not. Waits for the device."""
        own, others = self.values, other.values
        return own.keys() == others.keys() and all(
            (a is b is None) or (a is not None and b is not None and same_values(a, b))
            for a, b in ((own[slot], others[slot]) for slot in own)
        )

    def compare_later(self, previous: Snapshot, slots: list[Slot]) -> None:
        """Begin to find out on the device which of `slots` are as they were in `previous`."""
        flags = [_differs(self._apart[slot], previous._apart[slot]) for slot in slots]
        self._previous, self._compared = previous, slots
        self._changed = Arrival(torch.stack(flags))

    def share(self) -> list[Slot]:
        """Let go of what is the same as in the snapshot before, once that is known.

        Returns:
            What is not the same.
        """
        if self._changed is None or self._previous is None:
            return []
        differing = []
        for slot, changed in zip(self._compared, self._changed.value().tolist(), strict=True):
            if changed:
                differing.append(slot)
            else:
                self._apart[slot] = self._previous._apart[slot]
        self._previous = self._changed = None
        return differing


def _differs(a: Tensor | None, b: Tensor | None) -> Tensor:
    assert a is not None
    assert b is not None
    return (a != b).any()
