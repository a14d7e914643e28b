"""The devices of a job in two phases as the engine sees them (`ranges.protocol.Devices`), on Ray.

What crosses processes, as NumPy buffers in the object store:

    shards of a range       put by the coordinator in blocks, each read when the device needs it
    Z, dL/dZ of a range     the answer of `forward`, the argument of `replay`
    sums of gradients       from the device of the right neighbour to that of the left one, in a
                            tree; the device that has the last one writes it into the result file,
                            or it comes to the coordinator from a device that does not see that

A device whose last sum was taken is given back at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import ray
import torch

from gradbox_engine.model.calling.shard_feed import all_positions
from gradbox_engine.ranges import (
    EarlierOutputs,
    NamedSums,
    NormStatistics,
    Range,
    RangeCotangents,
    RangeGradient,
    RangeOutputs,
    Sums,
)
from gradbox_engine.ranges.split_job import between_phases
from gradbox_engine.requests import Group, Observer, Phase, Precision
from gradbox_worker.cluster.actor.open_job import StoredSums
from gradbox_worker.cluster.coordinator.open_devices import OpenDevice, OpenDevices
from gradbox_worker.cluster.exchange.array_buffers import as_buffers, as_tensors, num_bytes
from gradbox_worker.computations.sections import GRADS
from gradbox_worker.files.result_in_place import ResultOnDisk
from gradbox_worker.files.rounded_gradients import RoundedGradients

T = TypeVar("T")


@dataclass(frozen=True)
class HeldSums:
    """The sums of a range, and of what was added to them, on the device that has them."""

    device: OpenDevice
    index: int


class RayDevices:
    """The devices of one job."""

    def __init__(
        self,
        open_devices: OpenDevices,
        groups: Sequence[Group],
        *,
        result: ResultOnDisk | None,
        rounding: RoundedGradients,
        observer: Observer,
    ) -> None:
        """Use what was leased.

        Args:
            groups: of the whole job.
            result: where sums of gradients go; None if they are not asked for.
            rounding: told of the rounding on the devices.
            observer: told of the shards of ranges that have ended, and about once a second.
        """
        self._open, self._positions = open_devices, all_positions(groups)
        self._result, self._rounding, self._observer = result, rounding, observer
        open_devices.moved.update(outputs=0, cotangents=0, sums=0)

    def take(self, part: Range) -> RayRangeDevice:
        """Return a device for a range: its own at first, then another one.

        Raises:
            ClusterGone: the head of the cluster ended.
        """
        blocks = self._open.blocks(self._positions[part.start : part.stop])
        return RayRangeDevice(self._open.take(part), self._open, blocks)

    def added(self, left: Sums, right: Sums) -> Future[Sums]:
        """Add the right sums to the left ones, where those are."""
        assert isinstance(left, HeldSums)
        assert isinstance(right, HeldSums)

        taken = right.device.ask("take_sums", right.index)

        def then(bytes_added: int) -> Sums:
            self._open.count("sums", bytes_added)
            right.device.held.discard(right.index)
            self._open.give_back_if_empty(right.device)
            return left

        added = left.device.ask("add", left.index, taken)
        return self._open.future(added, then, devices=(left.device, right.device))

    def fetched(self, sums: Sums) -> Future[NamedSums]:
        """Have sums written into the result file where they are, or bring them here."""
        assert isinstance(sums, HeldSums)
        bring = self._written if sums.device.writes_files else self._taken
        return self._open.called(partial(bring, sums), devices=(sums.device,))

    def between_phases(self, step: Callable[[], T], precision: Precision) -> T:
        """Run a step here, where no model is."""
        return between_phases(step, precision)

    def tick(self, phase: Phase, done: int, total: int) -> None:
        """Tell the job, which may be told to stop."""
        self._observer.step(phase, done, total)

    def _written(self, sums: HeldSums) -> NamedSums:
        """Return stand-ins, on `meta`, for sums that their device has written."""
        stored: StoredSums = ray.get(sums.device.ask("stored_sums", sums.index))
        if self._result is not None:
            self._result.lay_out_whole(stored.forms)
            placement = self._result.placement()
            if not ray.get(sums.device.ask("write_sums", sums.index, placement)):
                return self._taken(sums)
            self._rounding.add(stored.rounded)
        return {
            name.removeprefix(f"{GRADS}/"): torch.empty(shape, dtype=dtype, device="meta")
            for name, (shape, dtype) in stored.forms.items()
        }

    def _taken(self, sums: HeldSums) -> NamedSums:
        buffers = ray.get(sums.device.ask("take_sums", sums.index))
        self._open.count("sums", num_bytes(buffers))
        named: NamedSums = as_tensors(buffers, copy=False)
        return named


class RayRangeDevice:
    """One device, for the calls on one range."""

    def __init__(
        self, device: OpenDevice, open_devices: OpenDevices, blocks: Sequence[Any]
    ) -> None:
        self._device, self._open, self._blocks = device, open_devices, blocks

    def forward(self, part: Range) -> Future[RangeOutputs]:
        """Run the first pass of a range."""
        device = self._device
        device.held.add(part.index)

        def then(found: tuple[Any, int]) -> RangeOutputs:
            buffers, resumed = found
            self._open.note_resumed(resumed)
            self._open.count("outputs", num_bytes(buffers.outputs))
            outputs: RangeOutputs = as_tensors(buffers)
            return outputs

        answer = device.ask("forward", part, self._blocks, device.opened)
        return self._open.future(answer, then, devices=(device,))

    def resume(self, part: Range, earlier: EarlierOutputs) -> Future[None]:
        """Hold a range that an earlier job put through the model."""
        device = self._device
        device.held.add(part.index)
        buffers = as_buffers(earlier)
        self._open.count("outputs", num_bytes(buffers))
        answer = device.ask("resume", part, buffers, self._blocks, device.opened)
        return self._open.future(answer, self._open.note_resumed, devices=(device,))

    def replay(self, part: Range, cotangents: RangeCotangents) -> Future[RangeGradient]:
        """Replay a range; its sums stay there."""
        device = self._device

        def then(buffers: Any) -> RangeGradient:
            self._open.count("input_grads", num_bytes(buffers.input_grads))
            found: RangeGradient = as_tensors(buffers)
            return replace(found, sums=HeldSums(device, part.index))

        buffers = as_buffers(cotangents)
        self._open.count("cotangents", num_bytes(buffers))
        answer = device.ask("replay", part, buffers)
        return self._open.future(answer, then, devices=(device,))

    def check(self, part: Range, norms: dict[str, NormStatistics]) -> Future[int]:
        """Check the range's first shard, and give the range up."""
        answer = self._device.ask("check", part, as_buffers(norms))
        return self._open.future(answer, devices=(self._device,))
