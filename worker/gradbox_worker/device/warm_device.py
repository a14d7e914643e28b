"""A device with its models loaded, and what runs one job after the other on it.

It is the same wherever a device is: in the device process of a worker, and in an actor of a
cluster. Whoever has it run a job supervises that.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Final

import torch

from gradbox.protocol import DeviceMemory, ModelView
from gradbox_service.store import BlobStore
from gradbox_worker.computations.checkpoints import Pace
from gradbox_worker.computations.execution import Execution, StopNow
from gradbox_worker.computations.job import LoadedJob
from gradbox_worker.computations.kept_graphs import KeptGraphs
from gradbox_worker.computations.leading import ALONE, Leading, Rows
from gradbox_worker.computations.memory import (
    default_result_memory_bytes,
    measure_device,
    used_bytes,
)
from gradbox_worker.computations.memory_limit import MemoryLimit
from gradbox_worker.computations.placement import (
    choose_device,
    gpus_of,
    hardware_name,
    memory_bytes,
)
from gradbox_worker.device.settings import DeviceSettings
from gradbox_worker.exceptions_to_problems import Caught
from gradbox_worker.files.blob_tensors import Blobs, BlobTensors
from gradbox_worker.models import read_models_file
from gradbox_worker.models.models_file import ModelEntry
from gradbox_worker.models.registry import Registry
from gradbox_worker.runs import RunBook, RunStates, StateFiles
from gradbox_worker.work import Failed, Outcome, Supervision, Work

# Between two measurements of memory while a job runs; a shorter job has none.
MEASURE_S: Final = 0.5


class WarmDevice:
    """One device, the models on it, and the graphs and states of runs kept between jobs.

    Attributes:
        registry: the models.
        kept: the graphs that jobs left for later ones.
        runs: the states of runs; None where no book of runs was given.
        limit: what a job may allocate.
        result_memory_bytes: what may be in memory of a result on its way into its file, or None.
        views: the models that were described when it was opened.
        models: the versions of all that can be built, by name.
        unusable: why the others cannot.
        placement: the device as jobs name it.
    """

    def __init__(
        self,
        settings: DeviceSettings,
        *,
        measured: Callable[[DeviceMemory], None] = lambda memory: None,
        known: Mapping[str, str] | None = None,
        unusable: Mapping[str, str] | None = None,
        entries: Mapping[str, ModelEntry] | None = None,
        before_building: Callable[[str], None] = lambda name: None,
        blobs: BlobStore | None = None,
        book: RunBook | None = None,
        disk_reserve_bytes: int | None = None,
    ) -> None:
        """Open the device and build the models that are not known.

        Args:
            measured: hears what is in the device's memory, where a job runs for a while or has
                changed it.
            known: see `settings.Start`.
            unusable: see `settings.Start`.
            entries: of the models file, where that is not to be read here.
            before_building: called with the name of each model that is about to be built.
            blobs: the box's; those of the data folder alone if None, and then no result is small.
            book: the box's runs; None is none.
            disk_reserve_bytes: what states of runs leave free on the disk.

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
        views = {view.name: view for view in self.views}
        versions = dict(known or {}) | {v.name: v.version for v in self.views if v.usable}
        self.models = {name: versions[name] for name in self.registry.names if name in versions}
        self.unusable = dict(unusable or {}) | {
            name: view.reason for name, view in views.items() if not view.usable
        }
        self._blobs, self.kept = blobs or BlobStore(settings.data), KeptGraphs()
        self.runs: RunStates | None = None
        if book is not None:
            budget = settings.run_memory_bytes
            self.runs = RunStates(
                StateFiles(settings.data / "runs", disk_reserve_bytes=disk_reserve_bytes),
                book,
                device=device,
                budget_bytes=memory_bytes(*devices) // 4 if budget is None else budget,
            )
        pace_s = settings.checkpoint_after_s
        self._pace = None if pace_s is None else Pace.after(pace_s)
        self._gauge = Gauge(measured, self.registry)
        self._spoilt_by: Caught | None = None

    def memory(self) -> DeviceMemory:
        """Return what is in the device's memory between jobs."""
        return measure_device(*self.registry.devices, models=self.registry.sizes_bytes())

    def run(
        self,
        work: Work,
        supervision: Supervision,
        *,
        leading: Leading = ALONE,
        blobs: Blobs | None = None,
    ) -> Outcome:
        """Run a job to its end, or until it is to stop.

        Args:
            leading: which devices run it, of which this one leads the others.
            blobs: where its inputs are; None: in the data folder.

        Returns:
            What it ended in. After a failure that is `leaving` the process must end, with no tensor
            freed: see `Caught`.
        """
        self._gauge.begin()
        answer = Execution(
            work=work,
            registry=self.registry,
            blobs=blobs or self._blobs,
            kept=self.kept,
            observer=self.watched(supervision),
            leading=leading,
            runs=self.runs,
            result_memory_bytes=self.result_memory_bytes,
            limit=self.limit,
            pace=self._pace,
            phase_ended=supervision.phase_ended if work.timed else None,
            small_results=self._blobs.takes_small(0),
        ).attempt()
        self._gauge.end()
        if not isinstance(answer, Caught):
            return answer
        self._spoilt_by = answer  # whose error keeps tensors that must not be freed, see `Caught`
        return Failed(answer.problem, leaving=answer.spoilt)

    @contextmanager
    def helping(
        self, work: Work, supervision: Supervision, *, rows: Rows, blobs: Blobs | None
    ) -> Iterator[LoadedJob]:
        """Have a job ready here that another device leads, under the limit of memory.

        Args:
            rows: where dense rows go.
            blobs: as in `run`.

        Raises:
            GradboxError: the job's parts do not fit the model.
        """
        device = self.registry.device
        self.kept.begin(work, loaded=self.registry.holds(work.model))
        loaded = self.registry.get(work.model, work.model_version)
        with self.limit.held(), BlobTensors(blobs or self._blobs, device=device) as tensors:
            yield LoadedJob.of(
                work,
                loaded,
                tensors,
                device=device,
                observer=self.watched(supervision),
                rows=rows,
                result_memory_bytes=(
                    self.result_memory_bytes or default_result_memory_bytes(device)
                ),
                kept=self.kept,
                pace=self._pace,
            )

    def watched(self, supervision: Supervision) -> DeviceObserver:
        """Return an observer for the engine that tells progress and stops on request."""
        return DeviceObserver(supervision, gauge=self._gauge)

    def rest(self) -> float | None:
        """Free graphs that no job has used in time, and write states of runs that are due.

        See `KeptGraphs` and `RunStates`.
        """
        if self.kept.idle_left_s() == 0:
            self.kept.drop()
        if self.runs is not None:
            self.runs.rest()
        waits = (self.kept.idle_left_s(), None if self.runs is None else self.runs.rest_left_s())
        return min((wait for wait in waits if wait is not None), default=None)

    def close(self) -> None:
        """Write the states of runs that no file has."""
        if self.runs is not None:
            self.runs.close()


class Gauge:
    """Tells what is in the device's memory, now and then."""

    def __init__(self, measured: Callable[[DeviceMemory], None], registry: Registry) -> None:
        self._measured = measured
        self._registry = registry
        self._before_bytes = 0
        self._next_s = 0.0
        self._job_is_shown = False
        self._shown_models = registry.sizes_bytes()  # since the device is ready

    def begin(self) -> None:
        """A job begins; what memory holds now is not its own."""
        self._before_bytes = used_bytes(*self._registry.devices)
        self._next_s = time.monotonic() + MEASURE_S

    def step(self) -> None:
        """Measure, if that is due."""
        if time.monotonic() >= self._next_s:
            self._show(before_bytes=self._before_bytes)

    def end(self) -> None:
        """The job has ended: measure without it, unless it was short and no model moved."""
        moved = self._registry.sizes_bytes() != self._shown_models
        if moved or self._job_is_shown or time.monotonic() >= self._next_s:
            self._show(before_bytes=None)

    def _show(self, *, before_bytes: int | None) -> None:
        self._next_s, self._job_is_shown = time.monotonic() + MEASURE_S, before_bytes is not None
        self._shown_models = self._registry.sizes_bytes()
        memory = measure_device(
            *self._registry.devices, models=self._shown_models, before_bytes=before_bytes
        )
        self._measured(memory)


class DeviceObserver:
    """The engine's observer: hands progress on, and stops the job on request."""

    def __init__(self, supervision: Supervision, *, gauge: Gauge) -> None:
        self._supervision = supervision
        self._gauge = gauge

    def step(self, phase: str, done: int, total: int) -> None:
        """Hear of a step.

        Raises:
            StopNow: the job is to stop.
        """
        if self._supervision.stop_requested():
            raise StopNow
        self._gauge.step()
        self._supervision.progress(phase, done, total)
