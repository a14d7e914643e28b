"""The devices of a job as the engine sees them: a call on a range goes to the device that has it.

What crosses processes, as NumPy buffers in the object store:

    Z, dL/dZ of a range   the answer of `forward`, the argument of `replay`
    sums of gradients     from the device of the right neighbour to that of the left one, or here
    dense rows            in blocks, which the leader writes, see `rows`
    factors               of a range to the leader, or to another device for a block of a Gram
    values                what there is one of for each sample: losses, outputs, norms, projections,
                          blocks of a Gram; and what the loss reads for a range, to its device
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from gradbox_engine import Observer
from gradbox_engine.per_sample.planned_model import Plans
from gradbox_engine.ranges import (
    EarlierOutputs,
    HeldJob,
    NamedSums,
    NormStatistics,
    Range,
    RangeCotangents,
    RangeDevice,
    RangeGradient,
    RangeOutputs,
    Sums,
)
from gradbox_engine.ranges.samples import (
    RangeSamples,
    Rows,
    SampleDevice,
    SampleRanges,
    SampleTask,
)
from gradbox_engine.ranges.samples.split_samples import SUMMED
from gradbox_engine.requests import Phase, Precision
from gradbox_worker.cluster.held_ranges import (
    RangesInPhases,
    RangesOfSamples,
    SampleAnswer,
    SharedBySamples,
)
from gradbox_worker.cluster.helpers import Device, Helpers, Here, Then
from gradbox_worker.files.rounded_gradients import Measured, RoundedGradients

T = TypeVar("T")


class LedProgress:
    """Passes on how far the leader is itself; who watches adds the helpers' shards.

    Attributes:
        total: how many shards, or samples, the job has; 0 where that is not known yet.
    """

    def __init__(self, observer: Observer) -> None:
        self.total = 0
        self._observer = observer
        self._last: tuple[Phase, int] | None = None

    def step(self, phase: Phase, done: int, total: int) -> None:
        """Hear of a step of the leader's own, or of the cotangents."""
        if phase == "cotangents":
            self._observer.step(phase, done, total)
            return
        self._last = (phase, done)
        self._observer.step(phase, done, self.total or total)

    def tick(self, phase: Phase, total: int) -> None:
        """Hear about once a second that helpers compute; may raise to stop the job."""
        self.total = total
        done = self._last[1] if self._last is not None and self._last[0] == phase else 0
        self._observer.step(phase, done, total)


@dataclass(frozen=True)
class Held:
    """Sums, or rows, of a range, on the device that has them."""

    device: Device
    index: int


class LedDevices:
    """The devices of one job in two phases."""

    def __init__(self, helpers: Helpers, held: HeldJob, progress: LedProgress) -> None:
        self._helpers, self._held, self._progress = helpers, held, progress
        helpers.lead(RangesInPhases(held, lambda: 0), held.device)

    def take(self, part: Range) -> RangeDevice:
        """Return a device for a range: its own at first, then another one."""
        return RangeOnDevice(self._helpers.take(part), self._helpers)

    def added(self, left: Sums, right: Sums) -> Future[Sums]:
        """Add the sums where the left ones are; here if either is here.

        The total is the same either way, to the last bit.
        """
        assert isinstance(left, Held)
        assert isinstance(right, Held)
        into, other = (right, left) if isinstance(right.device, Here) else (left, right)

        def then(bytes_added: int) -> Sums:
            if into.device is not other.device:
                self._helpers.count("sums", bytes_added)
            return into

        return into.device.call(
            "add", into.index, other.device.give("take_sums", other.index), then=then
        )

    def fetched(self, sums: Sums) -> Future[NamedSums]:
        """Bring sums here."""
        assert isinstance(sums, Held)
        then = partial(sums.device.moved, "sums")
        return sums.device.call("take_sums", sums.index, then=then)

    def between_phases(self, step: Callable[[], T], precision: Precision) -> T:
        """Run a step here, without kept graphs where memory runs out."""
        return self._held.freeing_graphs(step)

    def tick(self, phase: Phase, done: int, total: int) -> None:
        """Tell who watches the job, which may be told to stop."""
        self._progress.tick(phase, total)


class RangeOnDevice:
    """One device, for the calls on one range."""

    def __init__(self, device: Device, helpers: Helpers) -> None:
        self._device, self._helpers = device, helpers

    def forward(self, part: Range) -> Future[RangeOutputs]:
        """Run the first pass of a range."""

        def then(found: tuple[RangeOutputs, int]) -> RangeOutputs:
            outputs, resumed = found
            self._helpers.note_resumed(resumed)
            self._device.moved("outputs", outputs.outputs)
            return outputs

        return self._device.call("forward", part, then=then)

    def resume(self, part: Range, earlier: EarlierOutputs) -> Future[None]:
        """Hold a range that an earlier job put through the model."""
        then = self._helpers.note_resumed
        return self._device.call("resume", part, earlier, sent="outputs", then=then)

    def replay(self, part: Range, cotangents: RangeCotangents) -> Future[RangeGradient]:
        """Replay a range; its sums stay there."""

        def then(found: RangeGradient) -> RangeGradient:
            self._device.moved("input_grads", found.input_grads)
            return replace(found, sums=Held(self._device, part.index))

        return self._device.call("replay", part, cotangents, sent="cotangents", then=then)

    def check(self, part: Range, norms: dict[str, NormStatistics]) -> Future[int]:
        """Check the range's first shard, and give the range up."""
        return self._device.call("check", part, norms, sent="cotangents")


class LedSampleDevices:
    """The devices of one per-sample job."""

    def __init__(
        self,
        helpers: Helpers,
        own: SampleRanges,
        *,
        device: torch.device,
        rounding: RoundedGradients,
        progress: LedProgress,
    ) -> None:
        self.helpers, self._progress, self._rounding = helpers, progress, rounding
        helpers.lead(RangesOfSamples(own, rounding, lambda: 0), device)
        self._measured: list[Measured] = []
        self._shared: dict[tuple[int, int, int], SharedBySamples] = {}
        self._factors: dict[Held, Any] = {}

    def take(self, part: Range) -> SampleDevice:
        """Return a device for a call on a range."""
        return SamplesOnDevice(self.helpers.take(part), self)

    def step(self, phase: Phase, done: int, total: int) -> None:
        """Hear about once a second that ranges run, as the observer of the whole job."""
        self._progress.tick(phase, total)

    def gram(self, left: Rows, right: Rows | None, *, trace: bool) -> Future[Tensor]:
        """Multiply the rows of two ranges, on the device of either, so that all do as much."""
        assert isinstance(left, Held)
        assert right is None or isinstance(right, Held)
        where = left if right is None or (left.index + right.index) % 2 == 0 else right

        def side(rows: Held | None) -> Any:
            if rows is None:
                return None
            return rows.index if rows.device is where.device else self._given(rows)

        def then(found: tuple[Tensor, int]) -> Tensor:
            gram, moved_bytes = found
            self.helpers.count("factors", moved_bytes)
            where.device.moved("values", gram)
            return gram

        return where.device.call("gram", side(left), side(right), trace, sent="", then=then)

    def _given(self, rows: Held) -> Any:
        """Return a range's factors for another device, which crosses processes once."""
        if rows not in self._factors:
            self._factors[rows] = rows.device.give("factors", rows.index)
        return self._factors[rows]

    def sent(self, task: SampleTask) -> tuple[SampleTask, SharedBySamples]:
        """Return a task without what the tasks of all ranges have, and that."""
        vectors = task.vectors if isinstance(task.vectors, dict) else None
        key = id(task.plans), id(task.against), id(vectors)
        if key not in self._shared:
            self._shared[key] = SharedBySamples(task.plans, task.against, vectors)
        own = None if isinstance(task.vectors, dict) else task.vectors
        return replace(task, plans={}, against=None, vectors=own), self._shared[key]

    def begun(self, task: SampleTask, rows: Held) -> None:
        """Hear that a range runs, whose rows are made again if there were any."""
        self._progress.total = task.num_samples
        self._factors.pop(rows, None)

    def joined(self, answer: SampleAnswer, task: SampleTask, held: Held) -> RangeSamples:
        """Return what a range gave, here."""
        self.helpers.note_resumed(answer.resumed)
        if not isinstance(held.device, Here):
            self._measured.append(answer.rounded)
        result, kind = answer.result, "sums" if task.reduce in SUMMED else "values"
        held.device.moved("factors", result.factors)
        held.device.moved(kind, result.arrays)
        held.device.moved("values", [result.parameter_norms, result.values, result.other_values])
        return RangeSamples(result, held if task.keep_rows else None)

    def add_rounding(self) -> None:
        """Take into account what helpers have rounded."""
        for measured in self._measured:
            self._rounding.add(measured)


class SamplesOnDevice:
    """One device, for a call on a range."""

    def __init__(self, device: Device, devices: LedSampleDevices) -> None:
        self._device, self._devices = device, devices

    def plans(self, part: Range, shards: Sequence[int], *, of_others: bool) -> Future[Plans]:
        """Plan the shapes of some shards."""
        return self._device.call("plans", shards, of_others)

    def smaller(self, part: Range, task: SampleTask) -> Future[bool]:
        """Return whether `form="auto"` keeps factors."""
        return self._call("smaller", part, task)

    def run(self, part: Range, task: SampleTask) -> Future[RangeSamples]:
        """Compute a range."""
        held = Held(self._device, part.index)
        self._devices.begun(task, held)
        return self._call(
            "run", part, task, then=lambda found: self._devices.joined(found, task, held)
        )

    def _call(
        self, method: str, part: Range, task: SampleTask, then: Then = lambda found: found
    ) -> Future[Any]:
        own, shared = self._devices.sent(task)
        return self._device.call(method, part, own, self._device.share(shared), then=then)
