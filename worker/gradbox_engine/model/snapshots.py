"""The values of a model's buffers at one moment.

Two snapshots share what did not change between them. Buffers that have once been seen to change are
packed into one flat tensor for each dtype, for a tensor takes more memory than a statistic.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors

from gradbox_engine.model.host_copy import HostCopy
from gradbox_engine.model.tensor_equality import same_values

Slot = tuple[str, str]
"""A submodule's name and the buffer's name in it."""

Live = dict[Slot, Tensor | None]


@dataclass(frozen=True)
class Layout:
    """Where each of several tensors of one dtype and device lies in a flat one."""

    shapes: tuple[torch.Size, ...]
    sizes: tuple[int, ...]

    @classmethod
    def of(cls, tensors: Sequence[Tensor]) -> Layout:
        """Return how `flattened` lays these out."""
        shapes = tuple(tensor.shape for tensor in tensors)
        return cls(shapes, tuple(map(math.prod, shapes)))

    def parts(self, flat: Tensor) -> list[Tensor]:
        """Return the tensors' values, as views."""
        pieces = flat.split(self.sizes)  # type: ignore[no-untyped-call]
        return [
            piece if len(shape) == 1 else piece.view(shape)
            for piece, shape in zip(pieces, self.shapes, strict=True)
        ]


@torch.no_grad()
def flattened(tensors: Sequence[Tensor]) -> Tensor:
    """Return a flat copy of all of them, one behind the other."""
    flat: Tensor = _flatten_dense_tensors(tensors)  # type: ignore[no-untyped-call]
    return flat.clone() if len(tensors) == 1 else flat  # one alone comes as a view


class PackedValues(NamedTuple):
    """Several buffers' values in one flat tensor."""

    slots: tuple[Slot, ...]
    layout: Layout
    flat: Tensor


class Snapshot:
    """The values of all buffers at one moment. Nothing writes to these tensors.

    `versions` are the registered tensors' version counters, where those were bound.
    """

    def __init__(
        self, apart: Live, packed: Sequence[PackedValues] = (), *, versions: Mapping[Slot, int]
    ) -> None:
        self.versions = versions
        self._apart = apart
        self._packed = packed
        self._previous: Snapshot | None = None
        self._compared: list[Slot] = []
        self._differs: HostCopy | None = None

    @property
    def values(self) -> Live:
        """All values by slot, those kept together as views."""
        together = (zip(p.slots, p.layout.parts(p.flat), strict=True) for p in self._packed)
        return self._apart | dict(chain.from_iterable(together))

    def apart(self, slot: Slot) -> Tensor | None:
        """Return the value of a slot that is kept by itself; None if it is not."""
        return self._apart.get(slot)

    def equals(self, other: Snapshot) -> bool:
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


def _differs(a: Tensor | None, b: Tensor | None) -> Tensor:
    assert a is not None
    assert b is not None
    return (a != b).any()
