"""A device of a cluster: the warm device of `device.warm_device`, and ranges that others lead.

Calls that compute run one after the other in one thread, for what a job holds between two calls
belongs to its thread. Which calls run beside them is said in `device_actor`.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

import numpy
import ray
import torch

from gradbox.printable import log_to_stderr
from gradbox.protocol import DeviceMemory
from gradbox_engine import EngineError
from gradbox_service.database.connection import PATIENT, connect
from gradbox_service.jobs import Records
from gradbox_service.runs import Runs
from gradbox_service.store import BlobStore, ResultStore
from gradbox_worker.cluster.buffers import READ_ONLY, as_buffers, as_tensors
from gradbox_worker.cluster.held_ranges import RangesInPhases, RangesOfSamples, opened
from gradbox_worker.cluster.leading import Lead, leading_of
from gradbox_worker.cluster.messages import Described, Helper, News, PhaseSpan
from gradbox_worker.cluster.rows import RowsAtLeader
from gradbox_worker.cluster.shipping import PIECE_BYTES, OwnFolder, ShippedInputs, models_here
from gradbox_worker.computations.execution import StopNow
from gradbox_worker.computations.identity import gradbox_version
from gradbox_worker.device.entry import DeviceEntry
from gradbox_worker.device.importing import import_for_jobs
from gradbox_worker.device.settings import DeviceSettings
from gradbox_worker.device.warm_device import WarmDevice
from gradbox_worker.errors import JobStopped
from gradbox_worker.exceptions_to_problems import refuses_work
from gradbox_worker.files.blob_tensors import Blobs
from gradbox_worker.hints import with_hint
from gradbox_worker.models.shipping import ShippedModels
from gradbox_worker.runs import RecordedRuns
from gradbox_worker.work import Failed, Outcome, Work

T = TypeVar("T")

# For its last answer to be sent, before a process whose device is spoilt ends.
LEAVE_S: Final = 2.0


class JobOnDevice:
    """Implements `Supervision` where a job runs; who watches it is told by `news`.

    Attributes:
        job: its id, and the number of the attempt.
        lead: what leads other devices, if it does.
    """

    def __init__(self, job: tuple[str, int], stop_requested: Callable[[], bool]) -> None:
        self.job = job
        self.lead: Lead | None = None
        self._stop_requested = stop_requested
        self._step: tuple[str, int, int] | None = None
        self._phases: list[PhaseSpan] = []

    def stop_requested(self) -> bool:
        """Return whether the job is to stop."""
        return self._stop_requested()

    def progress(self, phase: str, done: int, total: int) -> None:
        """Note how far the job is."""
        self._step = (phase, done, total)

    def phase_ended(self, phase: str, *, began_s: float, ended_s: float) -> None:
        """Note a phase."""
        self._phases.append(PhaseSpan(phase, began_s, ended_s))

    def check(self) -> None:
        """Raise `StopNow` if the job is to stop."""
        if self._stop_requested():
            raise StopNow

    def news(self, memory: DeviceMemory | None) -> News:
        """Return what is new."""
        phases, self._phases = self._phases, []
        alone = self.lead is not None and self.lead.goes_on_alone
        return News(self._step, memory, phases, alone)


class ClusterDevice:
    """One device of a cluster; a `DeviceActor` calls it."""

    def __init__(
        self,
        settings: DeviceSettings,
        name: str,
        mark: tuple[Path, str],
        *,
        shipped: ShippedModels | None = None,
        files: Mapping[Path, Any] | None = None,
        known: Mapping[str, str] | None = None,
        unusable: Mapping[str, str] | None = None,
    ) -> None:
        """Open the device and build its models.

        Args:
            settings: without the models' entries.
            mark: a file in the box's data folder, and what is in it; who reads that there sees the
                data folder.
            shipped: on another machine than the head's, the models.
            files: references to the bytes of those of their files that this machine lacks.
            known: versions of the models that this device had before its process died; they are
                built when a job needs them.
            unusable: why others could not be built then.
        """
        log_to_stderr("device[%(process)d] ")
        logging.getLogger("gradbox_worker").setLevel(logging.INFO)
        warnings.filterwarnings("ignore", message=READ_ONLY)
        self._name, self._models_file = name, settings.models_file
        self._running: JobOnDevice | None = None
        self._memory: DeviceMemory | None = None
        self._stopped: tuple[str, int] | None = None
        self._leaving = False
        self._resting = threading.Timer(0.0, lambda: None)
        self._open = ExitStack()
        self._ranges: RangesInPhases | RangesOfSamples | None = None
        self._rows: RowsAtLeader
        path, text = mark
        sees_files = path.is_file() and path.read_text() == text
        self._own = None if sees_files else OwnFolder()
        if self._own is not None:
            settings = replace(settings, data=self._own.path, checkpoint_after_s=math.inf)
        self._blobs: Blobs | None = None
        book = None
        if settings.redis_url is not None and sees_files:
            patient = connect(settings.redis_url, retries=PATIENT)
            self._blobs = BlobStore(settings.data, connection=patient)
            results = ResultStore(settings.data, connection=patient)
            book = RecordedRuns(Runs(patient), Records(patient), results)
        self._device = WarmDevice(
            settings,
            measured=self._measured,
            entries=None if shipped is None else models_here(shipped, files or {}),
            known=known,
            unusable=unusable,
            book=book,
        )

    def describe(self) -> Described:
        """Return what the device is."""
        device = self._device
        torch_version = torch.__version__.partition("+")[0]  # for a CPU and for a GPU alike
        return Described(
            entry=DeviceEntry(
                state="ready",
                placement=device.placement,
                hardware=device.hardware,
                models=device.models,
                unusable=device.unusable,
                memory=device.memory(),
            ),
            views=device.views,
            software=f"gradbox {gradbox_version()}, torch {torch_version}",
            sees_files=self._own is None,
            process=os.getpid(),
        )

    def import_for_jobs(self) -> None:
        """Import what jobs need, while there is none."""
        import_for_jobs(self._models_file)

    def run(
        self, work: Work, helpers: Sequence[Helper], inputs: ShippedInputs | None
    ) -> tuple[Outcome, News]:
        """Run a job, with the helpers that it has; returns its end, and what is left of the news.

        Args:
            inputs: for devices that do not see the data folder, of which this may be one.
        """
        self._close()
        watched = self._running = self._watched(work)
        work, blobs = self._here(work, inputs)
        leading = leading_of(work, helpers, own_name=self._name, shipped=inputs)
        watched.lead = leading if isinstance(leading, Lead) else None
        outcome = self._device.run(work, watched, leading=leading, blobs=blobs)
        if isinstance(outcome, Failed) and outcome.leaving:
            self._leave_soon()
        else:
            self.rest()
        return outcome, self.news()

    def open(self, work: Work, leader: Any, rows_name: str, inputs: ShippedInputs | None) -> None:
        """Make ready for ranges of a job that another device leads.

        Args:
            leader: a handle of its actor.
            rows_name: the second name of the file of dense rows, see `SharedRows`.
        """
        self._close()
        watched = self._running = self._watched(work)
        rows = RowsAtLeader(leader, watched.job, kept_as=rows_name, while_waiting=watched.check)
        work, blobs = self._here(work, inputs)
        helping = self._device.helping(work, watched, rows=rows, blobs=blobs)
        job = self._guarded(lambda: self._open.enter_context(helping))
        self._ranges = self._guarded(lambda: self._open.enter_context(opened(job)))
        self._rows = rows

    def _here(self, work: Work, inputs: ShippedInputs | None) -> tuple[Work, Blobs | None]:
        """Return a job as it is run here, and its blobs where these are not in the data folder."""
        if self._own is None:
            return work, self._blobs  # of the steps of runs, some are in Redis
        assert inputs is not None
        self._own.clear()
        return self._own.here(work, inputs), self._own.blobs(inputs)

    def read_result(self, name: str, offset: int) -> Any:
        """Return a piece of a result file of this device's own folder; an empty one at its end."""
        assert self._own is not None
        with (self._own.path / "results" / name).open("rb") as file:
            file.seek(offset)
            return numpy.frombuffer(file.read(PIECE_BYTES), numpy.uint8)

    def call(self, job: tuple[str, int], opened: None, method: str, *arguments: Any) -> Any:
        """Have the job that is open here do something; tensors come and go as buffers.

        Args:
            job: which one, and which attempt: by the time a call comes another may be open.
            opened: what `open` returned: where that failed, this call ends in the same way.
            method: of `RangesInPhases`, or of `RangesOfSamples`.
        """
        if self._ranges is None or self._running is None or self._running.job != job:
            raise JobStopped("the device is not open for this job")
        device = self._device.registry.device
        given = as_tensors(arguments, copy=method != "add", device=device)
        found = self._guarded(partial(getattr(self._ranges, method), *given))
        self._guarded(self._rows.finish)
        return as_buffers(found)

    def empty(self) -> None:
        """Drop what a job holds here, but graphs for a later one."""
        if self._leaving:
            os._exit(0)  # with no tensor freed, see `Caught`
        self._close()
        self.rest()

    def rest(self) -> None:
        """Drop graphs that have waited long enough for a job, between jobs; others later."""
        self._resting.cancel()
        left_s = None if self._ranges is not None else self._device.rest()
        if left_s is not None:
            compute = ray.get_runtime_context().current_actor.compute
            self._resting = threading.Timer(left_s, compute.remote, args=("rest",))
            self._resting.daemon = True
            self._resting.start()

    def news(self) -> News:
        """Return what is new of the job that runs here, or ran last."""
        memory, self._memory = self._memory, None
        return News(memory=memory) if self._running is None else self._running.news(memory)

    def _measured(self, memory: DeviceMemory) -> None:
        self._memory = memory

    def _watched(self, work: Work) -> JobOnDevice:
        job = (work.job_id, work.attempt)
        return JobOnDevice(job, lambda: self._stopped == job)

    def rows_of_helper(
        self, job: tuple[str, int], method: str, arguments: Mapping[str, Any]
    ) -> Any:
        """Do something for a helper with the rows of the job that this device leads."""
        running = self._running
        if running is None or running.job != job or running.lead is None:
            raise JobStopped("the device does not lead this job")
        return running.lead.rows.of_helper(method, arguments)

    def stop(self, job_id: str, attempt: int) -> None:
        """Have an attempt stop before its next shard."""
        self._stopped = (job_id, attempt)

    def _close(self) -> None:
        """Put the model back, in the thread that opened it, and drop what is held here."""
        self._ranges = None
        # What the engine refuses on the way out a range has refused before, or the job has failed.
        with suppress(EngineError):
            self._open.close()
        self._device.kept.rest()

    def _guarded(self, call: Callable[[], T]) -> T:
        """Call what computes for a job; what it raises goes to the leader."""
        try:
            return call()
        except StopNow:
            self._device.kept.drop()
            raise JobStopped("told to stop") from None
        except BaseException as error:
            if isinstance(error, EngineError):  # its arguments stay here
                error.args = (with_hint(error),)
            if any(map(refuses_work, self._device.registry.devices)):
                self._leave_soon()
            else:
                self._device.kept.drop()
            raise

    def _leave_soon(self) -> None:
        self._leaving = True
        leaving = threading.Timer(LEAVE_S, os._exit, args=(0,))
        leaving.daemon = True
        leaving.start()
