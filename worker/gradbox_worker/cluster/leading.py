"""The leader's side of a job over several devices: it computes as a single device does, and leads.

    ranges          of the earlier job whose graphs wait on the devices; or those that an earlier
                    attempt has left checkpoints of; or cut by bytes, one a device
    the leader      runs the last of them itself, in its own thread, once the others have begun
    sums            are added where they are, in the tree of `reduction`; the last one ends here

`led_devices` has the calls on ranges.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

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
from gradbox_engine.ranges import Devices, HeldJob, Range, cut
from gradbox_engine.ranges.coroutines import LostDevices, on_some_device, run_together
from gradbox_engine.ranges.samples import SampleRanges, SampleRun
from gradbox_service.store.files import files_of
from gradbox_worker.cluster.helpers import Device, Helpers
from gradbox_worker.cluster.led_devices import LedDevices, LedProgress, LedSampleDevices
from gradbox_worker.cluster.messages import Helper
from gradbox_worker.cluster.rows import SharedRows
from gradbox_worker.cluster.shipping import ShippedInputs
from gradbox_worker.computations.leading import ALONE, Leading, Rows, Run
from gradbox_worker.files.blob_tensors import BlobTensors
from gradbox_worker.files.result_in_memory import ResultPlace
from gradbox_worker.files.result_in_place import ResultOnDisk
from gradbox_worker.files.rounded_gradients import RoundedGradients
from gradbox_worker.stores.rows import RowBlock
from gradbox_worker.stores.scoring import Question, Scores, joined
from gradbox_worker.work import Work


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
    """Leads other devices through one attempt at a job; see `computations.leading.Leading`.

    Attributes:
        rows: the file of dense rows, to which helpers write too.
        goes_on_alone: whether the helpers are not needed any more.
    """

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
        self._progress: LedProgress
        self._samples: LedSampleDevices | None = None
        self.rows: SharedRows
        self.goes_on_alone = False

    def begin(self, result: ResultPlace) -> Rows:
        """Have the helpers make themselves ready."""
        assert isinstance(result, ResultOnDisk)  # a cluster's jobs have files
        self.rows, self._samples = SharedRows(self._work, result, self.helpers.count), None
        self.helpers.open(self.rows.kept_as, self._shipped, homes=self._waiting.homes)
        return self.rows

    def watched(self, observer: Observer) -> Observer:
        """Return who hears of the leader's own shards, and about once a second."""
        self._progress = LedProgress(observer)
        return self._progress

    def parts(
        self, groups: Sequence[InputGroup], tensors: BlobTensors, *, by_samples: bool = False
    ) -> tuple[Range, ...]:
        """Return the ranges; see the module."""
        num_shards = sum(len(group.shards) for group in groups)
        if not isinstance(self._work.spec, SampleSpec):
            self._progress.total = num_shards
        against = getattr(self._work.spec, "against_group", None)
        kind = "others-" if against in [group.name for group in groups] else ""
        for parts in (self._waiting.parts, ranges_left(self._work, kind=kind)):
            if parts and parts[-1].stop == num_shards:
                return parts
        costs = _costs(groups, tensors, by_samples=by_samples)
        return cut(costs, self.helpers.num_devices)

    def devices(self, held: HeldJob) -> Devices:
        """Return the devices of a job in two phases."""
        self.helpers.moved.update(outputs=0, cotangents=0, sums=0, inputs=0)
        return LedDevices(self.helpers, held, self._progress)

    def sample_devices(
        self, own: SampleRanges, *, device: torch.device, rounding: RoundedGradients
    ) -> LedSampleDevices:
        """Return the devices of a per-sample job."""
        self.helpers.moved.update(rows=0, factors=0, sums=0, values=0, inputs=0)
        self._samples = LedSampleDevices(
            self.helpers, own, device=device, rounding=rounding, progress=self._progress
        )
        return self._samples

    def scored(self, question: Question, blocks: Sequence[RowBlock], observer: Observer) -> Scores:
        """Have each device that sees the store's files score a range of the blocks, and join."""
        progress, lost = self._progress, LostDevices()
        progress.total = len(blocks)

        def take(part: Range) -> Device:
            readers = self.helpers.readers
            return readers[(part.index - part.num_ranges) % len(readers)]

        def call(device: Device, part: Range) -> Future[Scores]:
            given = device.share(question), blocks[part.start : part.stop]
            return device.call("scored", *given, then=partial(device.moved, "values"))

        parts = cut([block.num_rows for block in blocks], len(self.helpers.readers))
        found = run_together(
            [on_some_device(part, take, call, lost) for part in parts],
            tick=lambda _: progress.tick("products", len(blocks)),
        )
        return joined(question, found)

    def facts(self, runs: Sequence[Run]) -> Mapping[str, Any]:
        """Return what the receipt says of devices and ranges."""
        self.helpers.close()
        if self._samples is not None:
            self._samples.add_rounding()
        views = [_view(run, device) for run, device in zip(runs, self.helpers.ran, strict=False)]
        facts: dict[str, Any] = {"ranges": views, "bytes_moved": dict(self.helpers.moved)}
        if self.helpers.num_devices > 1:
            facts["device"] = f"{self.helpers.num_devices} devices"
        if self.helpers.resumed:
            facts["resumed"] = self.helpers.resumed
        return facts

    def alone(self) -> Leading:
        """Give the helpers back."""
        self.goes_on_alone = True
        return ALONE


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
    costs = _shares([sum(tensor.nbytes for tensor in form.values()) for form in forms])
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
