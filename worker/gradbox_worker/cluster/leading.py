"""The leader's side of a job over several devices: it computes as a single device does, and leads.

    ranges          of the earlier job whose graphs wait on the devices; or those that an earlier
                    attempt has left checkpoints of; or cut by bytes, one a device
    the leader      runs the last of them itself, in its own thread, once the others have begun
    sums            are added where they are, in the tree of `reduction`; the last one ends here

What crosses processes, as NumPy buffers in the object store:

    Z, dL/dZ of a range     the answer of `forward`, the argument of `replay`
    sums of gradients       from the device of the right neighbour to that of the left one, or here

`leading_samples` has the devices of per-sample jobs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import safe_open

from gradbox.protocol import (
    CotangentsLoss,
    GradientSpec,
    InputGroup,
    JobSpec,
    RangeView,
    Receipt,
    SampleSpec,
)
from gradbox_engine import Observer
from gradbox_engine.ranges import (
    Devices,
    EarlierOutputs,
    HeldJob,
    NamedSums,
    NormStatistics,
    OneDevice,
    Range,
    RangeCotangents,
    RangeDevice,
    RangeGradient,
    RangeOutputs,
    Sums,
    added,
    cut,
)
from gradbox_engine.ranges.samples import SampleRanges, SampleRun
from gradbox_engine.requests import Phase, Precision
from gradbox_service.store.files import files_of
from gradbox_worker.cluster.buffers import num_bytes
from gradbox_worker.cluster.helpers import Helpers, LedProgress, OpenHelper
from gradbox_worker.cluster.leading_samples import LedSampleDevices, SharedRows, rows_name
from gradbox_worker.cluster.messages import Helper
from gradbox_worker.cluster.shipping import ShippedInputs
from gradbox_worker.computations.leading import ALONE, Leading, Rows, Run
from gradbox_worker.files.blob_tensors import BlobTensors
from gradbox_worker.files.result_in_place import ResultOnDisk
from gradbox_worker.files.rounded_gradients import RoundedGradients
from gradbox_worker.work import Work

T = TypeVar("T")


def leading_of(
    work: Work, helpers: Sequence[Helper], *, own_name: str, shipped: ShippedInputs | None
) -> Leading:
    """Return what a job is led by on the first of its devices.

    A device that is alone runs it as on a plain box, unless there are ranges to go on with.

    Args:
        helpers: the other devices.
        shipped: the job's inputs, for those of other machines.
    """
    waiting = WaitingGraphs.of(work.spec, work.earlier_result)
    if helpers or waiting.parts or ranges_left(work):
        return Lead(work, helpers, own_name=own_name, waiting=waiting, shipped=shipped)
    return ALONE


class Lead:
    """Leads other devices through one attempt at a job; see `computations.leading.Leading`."""

    def __init__(
        self,
        work: Work,
        helpers: Sequence[Helper],
        *,
        own_name: str,
        waiting: WaitingGraphs,
        shipped: ShippedInputs | None,
    ) -> None:
        self.helpers = Helpers(work, helpers, own_name=own_name)
        self._work, self._waiting, self._shipped = work, waiting, shipped
        self._progress: LedProgress | None = None
        self._samples: LedSampleDevices | None = None
        self._num_devices = 1
        self._rows: SharedRows | None = None

    def begin(self, result: ResultOnDisk) -> Rows:
        """Have the helpers make themselves ready."""
        name = rows_name(self._work, result)
        result.share(self._work.checkpoints / name)
        self._rows, self._samples = SharedRows(result, name), None
        self.helpers.open(name, self._shipped, homes=self._waiting.homes)
        self._num_devices = self.helpers.num_devices
        return self._rows

    def watched(self, observer: Observer) -> Observer:
        """Return who hears of the leader's own shards, and about once a second."""
        self._progress = LedProgress(observer)
        return self._progress

    def parts(
        self,
        groups: Sequence[InputGroup],
        tensors: BlobTensors,
        *,
        by_samples: bool = False,
        of_others: bool = False,
    ) -> tuple[Range, ...]:
        """Return the ranges; see the module."""
        num_shards = sum(len(group.shards) for group in groups)
        if self._progress is not None and not isinstance(self._work.spec, SampleSpec):
            self._progress.total = num_shards
        kind = "others-" if of_others else ""
        left = ranges_left(self._work, kind=kind)
        for parts in (self._waiting.parts, left):
            if parts and parts[-1].stop == num_shards:
                return parts
        costs = _costs(groups, tensors, by_samples=by_samples)
        return cut(costs, self.helpers.num_devices)

    def devices(self, held: HeldJob) -> Devices:
        """Return the devices of a job in two phases."""
        assert self._progress is not None
        self.helpers.moved.update(outputs=0, cotangents=0, sums=0, inputs=0)
        return LedDevices(self.helpers, held, self._progress)

    def sample_devices(
        self, own: SampleRanges, *, device: torch.device, rounding: RoundedGradients
    ) -> LedSampleDevices:
        """Return the devices of a per-sample job."""
        assert self._rows is not None
        self.helpers.moved.update(rows=0, factors=0, sums=0, values=0, inputs=0)
        assert self._progress is not None
        self._samples = LedSampleDevices(
            self.helpers,
            own,
            device=device,
            rounding=rounding,
            rows=self._rows,
            progress=self._progress,
        )
        return self._samples

    def facts(self, runs: Sequence[Run]) -> Mapping[str, Any]:
        """Return what the receipt says of devices and ranges."""
        self.helpers.close()
        if self._samples is not None:
            self._samples.add_rounding()
        views = [_view(run, device) for run, device in zip(runs, self.helpers.ran, strict=False)]
        facts: dict[str, Any] = {"ranges": views, "bytes_moved": dict(self.helpers.moved)}
        if self._num_devices > 1:
            facts["device"] = f"{self._num_devices} devices"
        if self.helpers.resumed:
            facts["resumed"] = self.helpers.resumed
        return facts

    def alone(self) -> Leading:
        """Have the helpers freed."""
        self.helpers.free_all()
        return ALONE


@dataclass(frozen=True)
class HeldSums:
    """The sums of a range, and of what was added to them, on the helper that has them."""

    helper: OpenHelper
    index: int


class LedDevices:
    """The devices of one job in two phases, as the engine sees them; the first one is this."""

    def __init__(self, helpers: Helpers, held: HeldJob, progress: LedProgress) -> None:
        self._helpers, self._progress = helpers, progress
        self._own, helpers.device = OneDevice(held), held.device

    def take(self, part: Range) -> RangeDevice:
        """Return a device for a range: its own at first, then another one."""
        helper = self._helpers.take(part)
        if helper is None:
            return self._own
        return RangeOnHelper(helper, self._helpers)

    def added(self, left: Sums, right: Sums) -> Future[Sums]:
        """Add the right sums to the left ones, where those are; here if either is here."""
        there = [sums for sums in (left, right) if isinstance(sums, HeldSums)]
        if not there:
            return self._own.added(left, right)
        if len(there) == 2:
            return self._added_there(*there)

        def then(taken: NamedSums) -> NamedSums:
            return added(*(taken if sums is there[0] else _named(sums) for sums in (left, right)))

        return self._taken(there[0], then)

    def fetched(self, sums: Sums) -> Future[NamedSums]:
        """Bring sums here."""
        return self._taken(sums) if isinstance(sums, HeldSums) else self._own.fetched(sums)

    def between_phases(self, step: Callable[[], T], precision: Precision) -> T:
        """Run a step here."""
        return self._own.between_phases(step, precision)

    def tick(self, phase: Phase, done: int, total: int) -> None:
        """Tell who watches the job, which may be told to stop."""
        self._progress.tick(phase, total)

    def _added_there(self, left: HeldSums, right: HeldSums) -> Future[Sums]:
        def then(bytes_added: int) -> Sums:
            self._helpers.count("sums", bytes_added)
            right.helper.held.discard(right.index)
            self._helpers.free_if_empty(right.helper)
            return left

        taken = right.helper.ask("take_sums", right.index)
        answer = left.helper.ask("add", left.index, taken)
        return self._helpers.future(answer, then, helpers=(left.helper, right.helper))

    def _taken(
        self, sums: HeldSums, then: Callable[[NamedSums], NamedSums] = lambda taken: taken
    ) -> Future[Any]:
        """Take sums from their helper, and do something with them in the thread that waited."""

        def here(taken: NamedSums) -> NamedSums:
            self._helpers.count("sums", num_bytes(taken))
            sums.helper.held.discard(sums.index)
            self._helpers.free_if_empty(sums.helper)
            return then(taken)

        return self._helpers.call(sums.helper, "take_sums", sums.index, then=here)


def _named(sums: Sums) -> NamedSums:
    assert isinstance(sums, dict)
    return sums


class RangeOnHelper:
    """One helper, for the calls on one range."""

    def __init__(self, helper: OpenHelper, helpers: Helpers) -> None:
        self._helper, self._helpers = helper, helpers

    def forward(self, part: Range) -> Future[RangeOutputs]:
        """Run the first pass of a range."""
        self._helper.held.add(part.index)

        def then(found: tuple[RangeOutputs, int]) -> RangeOutputs:
            outputs, resumed = found
            self._helpers.note_resumed(resumed)
            self._helpers.count("outputs", num_bytes(outputs.outputs))
            return outputs

        return self._helpers.call(self._helper, "forward", part, then=then)

    def resume(self, part: Range, earlier: EarlierOutputs) -> Future[None]:
        """Hold a range that an earlier job put through the model."""
        self._helper.held.add(part.index)
        return self._helpers.call(
            self._helper, "resume", part, earlier, sent="outputs", then=self._helpers.note_resumed
        )

    def replay(self, part: Range, cotangents: RangeCotangents) -> Future[RangeGradient]:
        """Replay a range; its sums stay there."""

        def then(found: RangeGradient) -> RangeGradient:
            self._helpers.count("input_grads", num_bytes(found.input_grads))
            return replace(found, sums=HeldSums(self._helper, part.index))

        return self._helpers.call(
            self._helper, "replay", part, cotangents, sent="cotangents", then=then
        )

    def check(self, part: Range, norms: dict[str, NormStatistics]) -> Future[int]:
        """Check the range's first shard, and give the range up."""
        return self._helpers.call(self._helper, "check", part, norms, sent="cotangents")


@dataclass(frozen=True)
class WaitingGraphs:
    """Where graphs of a forward job wait for the gradient job at their cotangents.

    Its receipt says which device ran which range, and how many graphs it kept. The gradient job
    takes the same ranges, so that a device which is still there goes on with its graphs, and any
    other one replays.
    """

    ranges: tuple[RangeView, ...] = ()

    @classmethod
    def of(cls, spec: JobSpec, earlier_result: Path | None) -> WaitingGraphs:
        """Return what a job may find.

        Args:
            earlier_result: the forward job's result file, which may be gone.
        """
        if earlier_result is None or not isinstance(spec, GradientSpec):
            return cls()
        if not isinstance(spec.loss, CotangentsLoss):
            return cls()
        try:
            with safe_open(earlier_result, framework="pt") as file:
                receipt = Receipt.model_validate_json(file.metadata()["gradbox"])
        except FileNotFoundError:
            return cls()
        return cls(tuple(receipt.ranges or ()) if receipt.shards_retained else ())

    @property
    def parts(self) -> tuple[Range, ...]:
        """The ranges, for another job of the same shards."""
        return _parts([(run.start, run.stop) for run in self.ranges])

    @property
    def homes(self) -> dict[int, str]:
        """The device of each range."""
        return {index: run.device for index, run in enumerate(self.ranges)}


def ranges_left(work: Work, *, kind: str = "") -> tuple[Range, ...]:
    """Return the ranges that an earlier attempt has left checkpoints of, if these are all of them.

    Args:
        kind: what comes before the shards in the names of the files.
    """
    if work.attempt == 1:
        return ()
    named = re.compile(re.escape(f"{work.job_id}.{kind}") + r"(\d+)-(\d+)\.safetensors")
    found = [named.fullmatch(path.name) for path in files_of(work.checkpoints, work.job_id)]
    bounds = sorted((int(match[1]), int(match[2])) for match in found if match)
    ends = [0, *(stop for _, stop in bounds)]
    if [start for start, _ in bounds] != ends[:-1]:
        return ()
    return _parts(bounds)


def _parts(bounds: Sequence[tuple[int, int]]) -> tuple[Range, ...]:
    return tuple(
        Range(index, len(bounds), start, stop) for index, (start, stop) in enumerate(bounds)
    )


def _costs(groups: Sequence[InputGroup], tensors: BlobTensors, *, by_samples: bool) -> list[float]:
    """Return what each shard costs, by its bytes."""
    forms = [tensors.forms(ref) for group in groups for ref in group.shards]
    costs = _shares([sum(tensor.num_bytes for tensor in form.values()) for form in forms])
    if not by_samples:
        return costs
    samples = [max((f.shape[0] for f in form.values() if f.shape), default=1) for form in forms]
    return [a + b for a, b in zip(costs, _shares(samples), strict=True)]


def _shares(sizes: Sequence[int]) -> list[float]:
    return [size / max(1, sum(sizes)) for size in sizes]


def _view(run: Run, device: str) -> RangeView:
    shared = {"start": run.start, "stop": run.stop, "devices_lost": run.devices_lost}
    if isinstance(run, SampleRun):
        return RangeView(device=device, samples_s=run.seconds, **shared)
    return RangeView(
        device=device,
        forward_s=run.forward_s,
        replay_s=run.replay_s,
        shards_retained=run.retained,
        rerun_difference=run.rerun_difference,
        **shared,
    )
