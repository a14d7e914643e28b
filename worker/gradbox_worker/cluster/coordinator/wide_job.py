"""A job over several devices: each runs a range of the shards.

The coordinator reads the shards, sends each range to its device, does what concerns all of them
(`wide_computations`, `wide_samples`), and writes the result file and the receipt.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from typing import Any

import ray
from ray.exceptions import RayActorError

from gradbox.errors import WorkerLost
from gradbox.protocol import JacobianSpec, JobSpec, PerSampleGradientSpec
from gradbox_engine.errors import DeviceLost
from gradbox_engine.requests import Group, Phase
from gradbox_service.store import Room, blob_store
from gradbox_worker.cluster.actor.range_checkpoints import file_with_rows
from gradbox_worker.cluster.coordinator.joined import JoinedCluster
from gradbox_worker.cluster.coordinator.open_devices import OpenDevices
from gradbox_worker.cluster.coordinator.waiting_graphs import WaitingGraphs
from gradbox_worker.cluster.coordinator.wide_computations import (
    Answer,
    WideComputation,
    WideSetting,
    in_phases,
    tensors_of,
)
from gradbox_worker.cluster.coordinator.wide_samples import OfSamples
from gradbox_worker.cluster.exchange.array_buffers import HOST, TensorBuffer, num_bytes
from gradbox_worker.cluster.exchange.messages import (
    FROM_DEVICE,
    FromDevice,
    ProgressMade,
    RunFinished,
)
from gradbox_worker.cluster.exchange.sent_tensors import RangeJob
from gradbox_worker.cluster.head.leases import LeasedDevice, LeaseRequest
from gradbox_worker.computations.engine_inputs import input_groups
from gradbox_worker.computations.execution import StopNow
from gradbox_worker.computations.memory import PeakMemory
from gradbox_worker.computations.memory_limit import MemoryLimit
from gradbox_worker.computations.receipts import commit
from gradbox_worker.device.settings import DeviceSettings
from gradbox_worker.files.blob_tensors import BlobTensors, TensorForm
from gradbox_worker.files.result_in_place import ResultOnDisk
from gradbox_worker.files.rounded_gradients import RoundedGradients
from gradbox_worker.work import Work


def can_be_split(spec: JobSpec) -> bool:
    """Return whether a job has parts for several devices."""
    against = getattr(spec, "against_group", None)
    return sum(len(group.shards) for group in spec.inputs if group.name != against) > 1


class WideJob:
    """One attempt at a job over the devices of a lease."""

    def __init__(
        self,
        work: Work,
        cluster: JoinedCluster,
        leased: Sequence[LeasedDevice],
        *,
        request: LeaseRequest,
        waiting: WaitingGraphs | None,
        settings: DeviceSettings,
        report: Callable[[FromDevice], None],
        stop_requested: Callable[[], bool],
    ) -> None:
        self._work, self._spec = work, work.spec
        self._cluster, self._leased, self._request = cluster, leased, request
        self._waiting = waiting
        self._settings = settings
        self._report, self._stop_requested = report, stop_requested
        self._open: OpenDevices | None = None
        self._done: dict[str, tuple[str, int]] = {}  # by device: its phase, and shards done

    @property
    def leased(self) -> list[LeasedDevice]:
        """The devices that it has, of which some may have died since."""
        opened = self._open
        return list(self._leased) if opened is None else [device.leased for device in opened.alive]

    def run(self) -> RunFinished:
        """Run the job and write its result.

        Raises:
            CoupledShards: its shards cannot be split; nothing was written.
            StopNow: it was told to stop.
            ClusterGone: the head of the cluster ended.
            GradboxError, EngineError: see `computations.execution.Execution`.
        """
        work, spec, began = self._work, self._spec, time.perf_counter()
        room = Room(work.result_path.parent, work.disk_reserve_bytes)
        result_file = ResultOnDisk(work.result_path, room=room)
        limit = MemoryLimit(HOST, job_bytes=self._settings.job_memory_bytes)
        rounding = RoundedGradients(spec.transfer)
        blobs = blob_store(self._settings.data)
        with limit.held(), BlobTensors(blobs, device=HOST) as tensors, result_file:
            peak = PeakMemory(HOST)
            view = self._cluster.views[work.model]
            groups = input_groups(spec, view.methods, tensors)
            wide = _computation(work, tensors)
            rows = file_with_rows(work, result_file)
            forms = [[tensors.forms(ref) for ref in group.shards] for group in spec.inputs]
            self._open = self._opened(self._range_job(wide, forms, tensors, rows), groups)
            setting = WideSetting(
                work=work,
                devices=self._open,
                parts=self._waiting.parts if self._waiting else (),
                num_ranges=len(self._leased),
                groups=groups,
                forms=forms,
                tensors=tensors,
                result=result_file,
                rounding=rounding,
                observer=self,
            )
            load_s = time.perf_counter() - began
            with closing(self._open):
                computed, ranges = _run(wide, setting)
            written = commit(
                result_file,
                computed,
                work,
                rounding=rounding,
                weights_widened=self._open.weights_widened(),
                model=work.model,
                model_version=work.model_version,
                device=f"{len(self._leased)} devices",
                peak=peak,
                load_s=load_s,
                resumed=self._open.resumed,
                more_facts={"ranges": ranges, "bytes_moved": dict(self._open.moved)},
            )
        return RunFinished(result=written.view)

    def _range_job(
        self,
        wide: WideComputation,
        forms: Sequence[Sequence[Mapping[str, TensorForm]]],
        tensors: BlobTensors,
        rows: str,
    ) -> RangeJob:
        """Return what every device is told.

        Devices put no Z in order, but a sample's random numbers belong to its place in it.
        """
        spec = self._spec
        orders = [group.order for group in spec.inputs if group.order is not None]
        refs = [*orders, *spec.weights.values(), *tensors_of([spec.readout]), *wide.sent]
        return RangeJob(
            work=self._work,
            of_samples=isinstance(wide, OfSamples),
            loss_parameters=wide.loss_parameters,
            tensors={(ref.blob, ref.tensor): TensorBuffer.of(tensors.shared(ref)) for ref in refs},
            forms=forms,
            checkpoints=self._work.checkpoints,
            rows=rows,
            checkpoint_after_s=self._settings.checkpoint_after_s,
        )

    def _opened(self, job: RangeJob, groups: Sequence[Group]) -> OpenDevices:
        opened = OpenDevices(
            self._cluster,
            self._leased,
            request=self._request,
            job=ray.put(job),
            job_key=job.key,
            groups=groups,
            homes=self._waiting.homes if self._waiting else {},
            while_waiting=self._check,
        )
        opened.count("inputs", num_bytes(dict(job.tensors)))
        return opened

    def step(self, phase: Phase, done: int, total: int) -> None:
        """Hear of shards that are done, as the engine's observer; see `Devices.tick`.

        Raises:
            StopNow: the job is to stop.
            ClusterGone: the head of the cluster ended.
        """
        self._check()
        if phase != "cotangents":
            self._note_progress()
            running = [n for found, n in self._done.values() if found == phase]
            done = min(total, max(done, sum(running)))
        self._report(ProgressMade(phase=phase, done=done, total=total))

    def _check(self) -> None:
        if self._stop_requested():
            raise StopNow
        self._cluster.check()

    def _note_progress(self) -> None:
        """Note how far each device is."""
        assert self._open is not None
        for device in list(self._open.alive):
            try:
                news = ray.get(device.actor.news.remote())
            except RayActorError:
                continue
            for frame in news:
                message: Any = FROM_DEVICE.validate_json(frame)
                if isinstance(message, ProgressMade):
                    self._done[device.name] = (message.phase, message.done)


def _computation(work: Work, tensors: BlobTensors) -> WideComputation:
    if isinstance(work.spec, PerSampleGradientSpec | JacobianSpec):
        return OfSamples(work.spec)
    return in_phases(work, tensors)


def _run(wide: WideComputation, setting: WideSetting) -> Answer:
    try:
        return wide.run(setting)
    except DeviceLost as error:
        raise WorkerLost(str(error)) from error
