"""The devices of a per-sample job as the engine sees them (`ranges.samples.SampleDevices`), on Ray.

What crosses processes, as NumPy buffers in the object store:

    shards of a range     put by the coordinator in blocks, with what the loss reads for them
    dense rows            none from a device on the coordinator's machine, which writes them into
                          the result file; from others in blocks, which the coordinator writes
    factors               of a range to the coordinator, or to another device for a block of a Gram
    sums                  clipped sums and vjps, to the coordinator
    values                what there is one of for each sample: losses, outputs, norms, projections,
                          blocks of a Gram
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from threading import Lock
from typing import Any, Final

import ray
from torch import Tensor

from gradbox_engine.model.calling.shard_feed import Position
from gradbox_engine.ranges import Range
from gradbox_engine.ranges.samples import RangeSamples, Rows, SampleTask
from gradbox_engine.ranges.samples.split_samples import SUMMED
from gradbox_worker.cluster.actor.open_samples import SampleAnswer, SharedBySamples
from gradbox_worker.cluster.actor.row_outlet import Handed, RowLayout
from gradbox_worker.cluster.coordinator.open_devices import OpenDevice, OpenDevices
from gradbox_worker.cluster.exchange.array_buffers import (
    HOST,
    TensorBuffer,
    as_buffers,
    as_tensors,
    num_bytes,
)
from gradbox_worker.cluster.exchange.factor_buffers import FactorBuffers
from gradbox_worker.files.result_in_place import ResultOnDisk
from gradbox_worker.files.rounded_gradients import RoundedGradients

WAIT_S: Final = 0.2


@dataclass(frozen=True)
class HeldRows:
    """The rows of a range as factors, on the device that has them."""

    device: OpenDevice
    index: int


class RaySampleDevices:
    """The devices of one job.

    Places of shards in the job are positions: the group of the rows, and that of the other shards.
    """

    def __init__(
        self,
        open_devices: OpenDevices,
        *,
        groups: tuple[int, int | None],
        result: ResultOnDisk,
        rounding: RoundedGradients,
    ) -> None:
        """Use what was leased.

        Args:
            groups: the places, among the job's groups, of the one whose rows are wanted and of the
                one whose rows they are multiplied with.
            result: where dense rows go.
            rounding: told of the rounding on the devices.
        """
        self.open, self._groups = open_devices, groups
        self._result, self._rounding = result, rounding
        self._layout: RowLayout | None = None
        self._laying_out = Lock()
        self._shared: dict[tuple[int, int], Any] = {}
        self._factors: dict[HeldRows, Any] = {}
        open_devices.moved.update(rows=0, factors=0, sums=0, values=0)

    def take(self, part: Range) -> RaySampleDevice:
        """Return a device for a call on a range.

        Raises:
            ClusterGone: the head of the cluster ended.
        """
        return RaySampleDevice(self.open.take(part), self)

    def gram(self, left: Rows, right: Rows | None, *, trace: bool) -> Future[Tensor]:
        """Multiply the rows of two ranges, on the device of either, so that all do as much."""
        assert isinstance(left, HeldRows)

        def then(found: tuple[TensorBuffer, int]) -> Tensor:
            buffer, moved_bytes = found
            self.open.count("factors", moved_bytes)
            self.open.count("values", num_bytes(buffer))
            return buffer.tensor(copy=False)

        devices = [left.device]
        if right is None:
            answer = left.device.ask("gram", left.index, None, trace)
            return self.open.future(answer, then, devices=devices)
        assert isinstance(right, HeldRows)
        if (left.index + right.index) % 2 == 0:
            answer = left.device.ask("gram", left.index, self._sent(right), trace)
        else:
            answer = right.device.ask("gram", self._sent(left), right.index, trace)
        return self.open.future(answer, then, devices=[left.device, right.device])

    def forget(self, rows: HeldRows) -> None:
        """Ask for a range's factors again, for they are made again."""
        self._factors.pop(rows, None)

    def _sent(self, rows: HeldRows) -> Any:
        """Return a reference to a range's factors, which its device gives away once."""
        if rows not in self._factors:
            self._factors[rows] = rows.device.ask("factors", rows.index)
        return self._factors[rows]

    def blocks(self, part: Range, *, of_others: bool) -> list[Any]:
        """Return the shards of a range in the object store."""
        group = self._groups[1] if of_others else self._groups[0]
        assert group is not None
        return self.open.blocks([Position(group, n) for n in range(part.start, part.stop)])

    def shared(self, task: SampleTask) -> Any:
        """Return a reference to what the tasks of all ranges have; put once."""
        vectors = task.vectors if isinstance(task.vectors, dict) else None
        key = id(task.against), id(vectors)
        if key not in self._shared:
            against = None if task.against is None else FactorBuffers.of(task.against)
            shared = SharedBySamples(against, as_buffers(vectors))
            self.open.count("inputs", num_bytes(shared))
            self._shared[key] = ray.put(shared)
        return self._shared[key]

    def take_rows(self, device: OpenDevice, answer: Any) -> None:
        """Take the dense rows that a device hands over, until it has answered.

        Raises:
            StorageFull: the disk does not hold them.
        """
        while True:
            ended = bool(ray.wait([answer], timeout=0)[0])
            handed = ray.get(device.actor.take_rows.remote(0.0 if ended else WAIT_S))
            for one in handed:
                self._write(one, device)
            if ended and not handed:
                return

    def joined(self, answer: SampleAnswer, task: SampleTask, rows: Rows | None) -> RangeSamples:
        """Return what a range gave, here."""
        self._rounding.add(answer.rounded)
        self.open.note_resumed(answer.resumed)
        result = as_tensors(answer.result, copy=task.reduce in SUMMED)
        factors = answer.factors
        if factors is not None:
            self.open.count("factors", num_bytes(factors))
            result = replace(result, factors=factors.factored(HOST))
        summed = task.reduce in SUMMED
        self.open.count("sums" if summed else "values", num_bytes(result.arrays))
        self.open.count(
            "values", num_bytes([result.parameter_norms, result.values, result.other_values])
        )
        return RangeSamples(result, rows)

    def _write(self, handed: Handed, device: OpenDevice) -> None:
        if isinstance(handed, RowLayout):
            with self._laying_out:
                if self._layout is None:
                    self._result.lay_out(handed.shapes, handed.dtypes, squeezed=handed.squeezed)
                    self._layout = handed
            assert handed == self._layout
            placement = self._result.placement() if device.writes_files else None
            ray.get(device.actor.place_rows.remote(placement))
            return
        self.open.count("rows", num_bytes(handed))
        self._result.write(handed.name, handed.at, handed.piece.tensor(copy=False))


class RaySampleDevice:
    """One device, for a call on a range."""

    def __init__(self, device: OpenDevice, devices: RaySampleDevices) -> None:
        self._device, self._devices = device, devices

    def count(self, part: Range, *, of_others: bool) -> Future[tuple[int, ...]]:
        """Count the samples of each shard of a range."""
        blocks = self._devices.blocks(part, of_others=of_others)
        answer = self._device.ask("count", part, blocks, of_others, self._device.opened)
        return self._future(answer)

    def smaller(self, part: Range, task: SampleTask) -> Future[bool]:
        """Return whether `form="auto"` keeps factors."""
        return self._future(self._call("smaller", part, task))

    def run(self, part: Range, task: SampleTask) -> Future[RangeSamples]:
        """Compute a range."""
        device, devices = self._device, self._devices
        device.held.add(part.index)
        answer = self._call("run_samples", part, task)
        rows = None
        if task.keep_rows:
            rows = HeldRows(device, part.index)
            devices.forget(rows)

        def then(found: SampleAnswer) -> RangeSamples:
            if not task.keep_rows and not task.of_others:
                device.held.discard(part.index)
                devices.open.give_back_if_empty(device)
            return devices.joined(found, task, rows)

        return self._future(answer, then, meanwhile=partial(devices.take_rows, device, answer))

    def _call(self, name: str, part: Range, task: SampleTask) -> Any:
        shared = self._devices.shared(task)
        vectors = None if isinstance(task.vectors, dict) else task.vectors
        sent = as_buffers(replace(task, against=None, vectors=vectors))
        self._devices.open.count("inputs", num_bytes(sent))
        blocks = self._devices.blocks(part, of_others=task.of_others)
        return self._device.ask(name, part, sent, shared, blocks, self._device.opened)

    def _future(
        self,
        answer: Any,
        then: Callable[[Any], Any] = lambda found: found,
        *,
        meanwhile: Callable[[], object] = lambda: None,
    ) -> Future[Any]:
        devices = (self._device,)
        return self._devices.open.future(answer, then, devices=devices, meanwhile=meanwhile)
