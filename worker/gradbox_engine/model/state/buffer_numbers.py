"""The numbers of the registered buffers, before the first shard and after each.

Two states share what did not change between them. Buffers that have once been seen to change are
packed into one flat tensor for each dtype, for a tensor takes more memory than a statistic.

Change is told by value: writes through `.data`, and batch norm's own, leave no trace in a version
counter. On CUDA the comparison runs on the device, and is looked at after the next shard.

Cost: the changing buffers once a shard.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from gradbox_engine.model.host_copy import HostCopy
from gradbox_engine.model.tensor_equality import form, same_values, writable
from gradbox_engine.torch_private import copy_each, flattened, set_versions, version_of


class PackedNumbers(NamedTuple):
    """The numbers of several buffers of one dtype and device in one flat tensor."""

    indices: tuple[int, ...]
    shapes: tuple[torch.Size, ...]
    flat: Tensor

    @classmethod
    def of(cls, buffers: Mapping[int, Tensor]) -> PackedNumbers:
        """Copy the numbers of buffers, one behind the other."""
        tensors = tuple(buffers.values())
        flat = flattened(tensors)
        if len(tensors) == 1:
            flat = flat.clone()  # one alone comes as a view
        return cls(tuple(buffers), tuple(tensor.shape for tensor in tensors), flat)

    def items(self) -> Iterator[tuple[int, Tensor]]:
        """Return the buffers' numbers, as views."""
        pieces = self.flat.split([shape.numel() for shape in self.shapes])  # type: ignore[no-untyped-call]
        for index, shape, piece in zip(self.indices, self.shapes, pieces, strict=True):
            yield index, piece.view(shape)


class BufferNumbers:
    """The numbers of all these buffers at one moment. Nothing writes to these tensors.

    `versions` are the version counters, where there are any.
    """

    def __init__(
        self,
        apart: dict[int, Tensor],
        packed: Sequence[PackedNumbers] = (),
        *,
        versions: Mapping[int, int],
    ) -> None:
        self.versions = versions
        self._apart, self._packed = apart, packed
        self._previous: BufferNumbers | None = None
        self._compared: list[int] = []
        self._differs: HostCopy | None = None

    @property
    def values(self) -> dict[int, Tensor]:
        """All of them by index, those kept together as views."""
        return self._apart | dict(chain.from_iterable(p.items() for p in self._packed))

    def apart(self, index: int) -> Tensor | None:
        """Return those of a buffer that are kept by themselves; None if they are not."""
        return self._apart.get(index)

    def compare_later(self, previous: BufferNumbers, indices: list[int]) -> None:
        """Begin to find out on the device which buffers are as they were in `previous`."""
        flags = [(self._apart[index] != previous._apart[index]).any() for index in indices]
        self._previous, self._compared = previous, indices
        self._differs = HostCopy(torch.stack(flags))

    def share(self) -> list[int]:
        """Free what is the same as in the state before, once that is known.

        Returns:
            What is not the same.
        """
        if self._differs is None or self._previous is None:
            return []
        differing = []
        for index, differs in zip(self._compared, self._differs.value().tolist(), strict=True):
            if differs:
                differing.append(index)
            else:
                self._apart[index] = self._previous._apart[index]
        self._previous = self._differs = None
        return differing


class RegisteredBuffers:
    """Takes the numbers of registered buffers, and puts them back, whatever is bound to a name."""

    def __init__(self, buffers: Iterable[Tensor]) -> None:
        self._buffers = list({id(buffer): buffer for buffer in buffers}.values())
        self.indices = {id(buffer): index for index, buffer in enumerate(self._buffers)}
        self._data = [buffer.detach() for buffer in self._buffers]
        self._changing: set[int] = set()  # packed in each state
        self.first = self.take(None)

    def take(self, previous: BufferNumbers | None) -> BufferNumbers:
        """Return the numbers now, sharing with `previous` what did not change."""
        if previous is not None and not self._buffers:
            return previous
        with torch.no_grad():
            return self._taken(previous)

    def _taken(self, previous: BufferNumbers | None) -> BufferNumbers:
        if previous is not None:
            self._changing.update(previous.share())
        apart: dict[int, Tensor] = {}
        together: dict[tuple[torch.dtype, torch.device], dict[int, Tensor]] = {}
        compare: list[int] = []
        for index, buffer in enumerate(self._buffers):
            before = None if previous is None else previous.apart(index)
            strided = buffer.layout is torch.strided
            if index in self._changing and strided and form(self._data[index]) == form(buffer):
                together.setdefault((buffer.dtype, buffer.device), {})[index] = buffer
            elif before is None or form(buffer) != form(before):
                apart[index] = buffer.detach().clone()
            elif buffer.device.type != "cpu" and strided:
                apart[index] = buffer.detach().clone()
                compare.append(index)
            elif same_values(buffer, before):
                apart[index] = before
            else:
                apart[index] = buffer.detach().clone()
                self._changing.add(index)
        packed = [PackedNumbers.of(alike) for alike in together.values()]
        numbers = BufferNumbers(apart, packed, versions=self._versions())
        if previous is not None and compare:
            numbers.compare_later(previous, compare)
        return numbers

    def restore(self, numbers: BufferNumbers) -> None:
        """Give every buffer the numbers it had, no graph, and the version that graphs saved."""
        if self._buffers:
            with torch.no_grad():
                self._restore(numbers)

    def _restore(self, numbers: BufferNumbers) -> None:
        targets: list[Tensor] = []
        sources: list[Tensor] = []
        for index, value in numbers.values.items():
            buffer, data = self._buffers[index], self._data[index]
            if buffer.requires_grad:
                buffer.detach_()
            if form(buffer) != form(value) and form(data) == form(value):
                buffer.data = data
            if form(buffer) == form(value) and writable(buffer):
                targets.append(buffer.data)  # of a version counter of its own
                sources.append(value)
            elif not same_values(buffer, value):
                buffer.data = value.clone()
        if targets:
            copy_each(targets, sources)
        self._restore_versions(numbers.versions)

    def _versions(self) -> dict[int, int]:
        return {i: version_of(b) for i, b in enumerate(self._buffers) if not b.is_inference()}

    def _restore_versions(self, versions: Mapping[int, int]) -> None:
        """Let graphs that saved a buffer find the version that they saved.

        autograd takes a tensor for overwritten when its counter has moved on. Here the numbers
        were restored, so the counter is, too. A shard that overwrites in place what its own graph
        saved still fails, as in plain torch: its counter ends above the saved one.
        """
        buffers = tuple(self._buffers[index] for index in versions)
        set_versions(buffers, tuple(versions.values()))
