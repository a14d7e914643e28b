"""A device with its models loaded, and what runs one job after the other on it.

It is the same wherever a device is: in the device process of a worker, and in an actor of a
cluster. Whoever holds it passes orders in and hears its messages.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Final

import torch

from gradbox.protocol import DeviceMemory, ModelView
from gradbox_service.store import blob_store
from gradbox_worker.computations.checkpoints import Pace
from gradbox_worker.computations.execution import Execution, StopNow
from gradbox_worker.computations.kept_graphs import KeptGraphs
from gradbox_worker.computations.memory import measure_device, used_bytes
from gradbox_worker.computations.memory_limit import MemoryLimit
from gradbox_worker.computations.placement import (
    choose_device,
    gpus_of,
    hardware_name,
    memory_bytes,
)
from gradbox_worker.device.child import DeviceSettings
from gradbox_worker.device.messages import (
    FromDevice,
    MemoryMeasured,
    PhaseTimed,
    ProgressMade,
    RunFailed,
    RunFinished,
    RunStopped,
)
from gradbox_worker.exceptions_to_problems import Caught
from gradbox_worker.models import read_models_file
from gradbox_worker.models.models_file import ModelEntry
from gradbox_worker.models.registry import Registry
from gradbox_worker.work import Finished, Stopped, Work

REPORT_S: Final = 0.1
MEASURE_S: Final = 0.5


class WarmDevice:
    """One device, the models on it, and the graphs kept between jobs.

    Attributes:
        registry: the models.
        kept: the graphs that jobs left for later ones.
        limit: what a job may allocate.
        result_memory_bytes: what may be in memory of a result on its way into its file, or None.
        views: the models that were described when it was opened.
        placement: the device as jobs name it.
    """

    def __init__(
        self,
        settings: DeviceSettings,
        *,
        report: Callable[[FromDevice], None],
        known: Mapping[str, str] | None = None,
        unusable: Mapping[str, str] | None = None,
        entries: Mapping[str, ModelEntry] | None = None,
        before_building: Callable[[str], None] = lambda name: None,
    ) -> None:
        """Open the device and build the models that are not known.

        Args:
            report: hears of progress, phases and memory while a job runs.
            known: see `messages.Begin`.
            unusable: see `messages.Begin`.
            entries: of the models file, where that is not to be read here.
            before_building: called with the name of each model that is about to be built.

        Raises:
            ModelsFileError: the models file cannot be read.
            DeviceNotStarted: there is no such device.
        """
        device = choose_device(settings.device)
        if device.type == "cuda":
            torch.cuda.set_device(device)  # for models that say "cuda" and mean theirs
        gpus = gpus_of(device, num_gpus=settings.num_gpus)
        budget = settings.model_memory_bytes
        self.registry = Registry(
            read_models_file(settings.models_file) if entries is None else entries,
            device=device,
            gpus=gpus,
            budget_bytes=memory_bytes(*(gpus or (device,))) // 2 if budget is None else budget,
            versions=known,
            unusable=unusable,
            limit=MemoryLimit(device).held,
        )
        devices = self.registry.devices
        self.views: list[ModelView] = self.registry.describe(
            before=before_building, beside=settings.beside
        )
        self.placement = str(device)
        self.hardware = hardware_name(*devices)
        self.limit = MemoryLimit(*devices, job_bytes=settings.job_memory_bytes)
        self.result_memory_bytes = settings.result_memory_bytes
        self._report = report
        self._blobs, self.kept = blob_store(settings.data), KeptGraphs()
        pace_s = settings.checkpoint_after_s
        self._pace = None if pace_s is None else Pace.after(pace_s)
        self._gauge = Gauge(report, self.registry)
        self._spoilt_by: Caught | None = None

    def memory(self) -> DeviceMemory:
        """Return what is in the device's memory between jobs."""
        return measure_device(*self.registry.devices, models=self.registry.sizes_bytes())

    def run(
        self, work: Work, *, stop_requested: Callable[[], bool]
    ) -> RunFinished | RunFailed | RunStopped:
        """Run a job to its end.

        Args:
            stop_requested: asked before each shard.

        Returns:
            What it ended in. After a failure that is `leaving` the process must end, with no tensor
            freed: see `Caught`.
        """
        self._gauge.begin()
        observer = self.watched(stop_requested=stop_requested)
        answer = Execution(
            work=work,
            registry=self.registry,
            blobs=self._blobs,
            kept=self.kept,
            observer=observer,
            result_memory_bytes=self.result_memory_bytes,
            limit=self.limit,
            pace=self._pace,
            phase_ended=observer.phase_ended if work.timed else None,
        ).attempt()
        self._gauge.end()
        match answer:
            case Finished():
                return RunFinished(result=answer.result)
            case Stopped():
                return RunStopped()
        self._spoilt_by = answer  # whose error keeps tensors that must not be freed, see `Caught`
        return RunFailed(problem=answer.problem, leaving=answer.spoilt)

    def watched(self, *, stop_requested: Callable[[], bool]) -> Reporter:
        """Return an observer for the engine that tells progress and stops on request."""
        return Reporter(self._report, stop_requested=stop_requested, gauge=self._gauge)


class Gauge:
    """Tells what is in the device's memory, now and then."""

    def __init__(self, report: Callable[[FromDevice], None], registry: Registry) -> None:
        self._report = report
        self._registry = registry
        self._before_bytes = 0
        self._sent_at = 0.0
        self._job_is_shown = False
        self._sent_models = registry.sizes_bytes()  # with the message that the device is ready

    def begin(self) -> None:
        """A job begins; what memory holds now is not its own."""
        self._before_bytes = used_bytes(*self._registry.devices)

    def step(self) -> None:
        """Measure, if that was not done a moment ago."""
        if time.monotonic() - self._sent_at >= MEASURE_S:
            self._send(before_bytes=self._before_bytes)

    def end(self) -> None:
        """The job has ended: measure without it, unless nobody heard of it and no model moved."""
        moved = self._registry.sizes_bytes() != self._sent_models
        if moved or self._job_is_shown or time.monotonic() - self._sent_at >= MEASURE_S:
            self._send(before_bytes=None)

    def _send(self, *, before_bytes: int | None) -> None:
        self._sent_at, self._job_is_shown = time.monotonic(), before_bytes is not None
        self._sent_models = self._registry.sizes_bytes()
        memory = measure_device(
            *self._registry.devices, models=self._sent_models, before_bytes=before_bytes
        )
        self._report(MemoryMeasured(memory=memory))


class Reporter:
    """The engine's observer: tells progress now and then, and stops the job on request."""

    def __init__(
        self,
        report: Callable[[FromDevice], None],
        *,
        stop_requested: Callable[[], bool],
        gauge: Gauge,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._report = report
        self._stop_requested = stop_requested
        self._gauge = gauge
        self._clock = clock
        self._phase = ""
        self._reported_at = 0.0

    def step(self, phase: str, done: int, total: int) -> None:
        """Hear of a step.

        Raises:
            StopNow: the job is to stop.
        """
        if self._stop_requested():
            raise StopNow
        self._gauge.step()
        now = self._clock()
        if phase == self._phase and now - self._reported_at < REPORT_S:
            return
        self._phase, self._reported_at = phase, now
        self._report(ProgressMade(phase=phase, done=done, total=total))

    def phase_ended(self, phase: str, *, began_s: float, ended_s: float) -> None:
        """Hear of a phase that ended."""
        self._report(PhaseTimed(phase=phase, began_s=began_s, ended_s=ended_s))
