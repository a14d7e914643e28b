"""A device of a cluster: the warm device of `device.warm_device`, and ranges of wide jobs.

Calls that compute run one after the other in one thread, for what a job holds between two calls
belongs to its thread. Which calls run beside them is said in `device_actor`.
"""

from __future__ import annotations

import os
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

import ray
import torch

from gradbox.printable import log_to_stderr
from gradbox_engine import EngineError
from gradbox_engine.ranges.protocol import Range, RangeCotangents
from gradbox_worker.cluster.actor.open_job import OpenJob, StoredSums
from gradbox_worker.cluster.actor.open_samples import OpenSamples, SampleAnswer, SharedBySamples
from gradbox_worker.cluster.actor.row_outlet import Handed
from gradbox_worker.cluster.exchange.array_buffers import (
    READ_ONLY,
    as_buffers,
    as_tensors,
    num_bytes,
)
from gradbox_worker.cluster.exchange.factor_buffers import FactorBuffers
from gradbox_worker.cluster.exchange.messages import (
    FromDevice,
    MemoryMeasured,
    PhaseTimed,
    ProgressMade,
    Run,
    RunFailed,
    RunFinished,
    RunStopped,
)
from gradbox_worker.cluster.exchange.sent_tensors import RangeJob
from gradbox_worker.cluster.exchange.shipped_models import models_here
from gradbox_worker.computations.execution import StopNow
from gradbox_worker.computations.receipts import gradbox_version
from gradbox_worker.device.importing import import_for_jobs
from gradbox_worker.device.settings import DeviceSettings
from gradbox_worker.device.warm_device import WarmDevice
from gradbox_worker.errors import JobStopped
from gradbox_worker.exceptions_to_problems import refuses_work
from gradbox_worker.files.placed_rows import Placement
from gradbox_worker.hints import with_hint
from gradbox_worker.work import Failed, Finished, Supervision

T = TypeVar("T")

# For its last answer to be sent, before a process whose device is spoilt ends.
LEAVE_S: Final = 2.0
OPENING_S: Final = 0.02
REPORT_S: Final = 0.1


class ClusterDevice:
    """One device of a cluster; a `DeviceActor` calls it."""

    def __init__(
        self, settings: DeviceSettings, mark: tuple[Path, str], models: str | None
    ) -> None:
        """Open the device and build its models.

        Args:
            settings: those of a device process.
            mark: a file in the box's data folder, and what stands in it; who reads that there sees
                the data folder.
            models: on another machine than the head's, the actor that has the models' files.
        """
        log_to_stderr("device[%(process)d] ")
        warnings.filterwarnings("ignore", message=READ_ONLY)
        self._news: deque[FromDevice] = deque()
        self._stopped: tuple[str, int] | None = None
        self._abandoned = False
        self._leaving = False
        self._held: OpenJob | OpenSamples | None = None
        self._ranges: set[int] = set()  # of the job that is open, those that were run here
        self._open_for: tuple[str, int] | None = None
        self._mark = mark
        entries = None if models is None else models_here(ray.get_actor(models))
        self._device = WarmDevice(
            settings,
            measured=lambda memory: self._news.append(MemoryMeasured(memory=memory)),
            entries=entries,
        )

    def describe(self) -> dict[str, Any]:
        """Say what the device is: its models as JSON, and whether it sees the data folder."""
        torch_version = torch.__version__.partition("+")[0]  # for a CPU and for a GPU alike
        return {
            "models": [view.model_dump_json() for view in self._device.views],
            "placement": self._device.placement,
            "hardware": self._device.hardware,
            "process": os.getpid(),
            "software": f"gradbox {gradbox_version()}, torch {torch_version}",
            "sees_files": self._sees_files(),
        }

    def import_for_jobs(self) -> None:
        """Import what jobs need, while there is none."""
        import_for_jobs()

    def _sees_files(self) -> bool:
        path, text = self._mark
        return path.is_file() and path.read_text() == text

    def run(self, order: str) -> list[str]:
        """Run a whole job; returns the messages that are left, the outcome last."""
        work = Run.model_validate_json(order).work
        self._close()
        found = self._device.run(work, self._supervision(work.job_id, work.attempt))
        match found:
            case Finished():
                answer: FromDevice = RunFinished(result=found.result)
            case Failed():
                answer = RunFailed(problem=found.problem, leaving=found.leaving)
            case _:
                answer = RunStopped()
        if isinstance(found, Failed) and found.leaving:
            self._leave_soon()
        return [*self.news(), answer.model_dump_json()]

    def open(self, job: RangeJob) -> int:
        """Make ready for ranges of a job; returns how many of its weights were widened."""
        self._close()
        if not self._sees_files():
            job = replace(job, checkpoints=None)
        self._open_for = job.key
        observer = self._device.watched(self._supervision(*job.key))
        held: OpenJob | OpenSamples
        if job.of_samples:
            held = self._guarded(partial(OpenSamples, self._device, job, observer=observer))
        else:
            held = self._guarded(partial(OpenJob, self._device, job, observer=observer))
        self._held = held
        return held.weights_widened

    def forward(self, part: Range, blocks: Any, opened: int) -> tuple[Any, int]:
        """Run the first pass of a range.

        Args:
            opened: what `open` returned: where that failed, this call ends in the same way.

        Returns:
            `RangeOutputs` of buffers, and how often it went on from a checkpoint.
        """
        job = self._in_phases()
        outputs = as_buffers(self._guarded(partial(job.forward, part, blocks)))
        self._ranges.add(part.index)
        return outputs, job.resumed(part)

    def resume(self, part: Range, earlier: Any, blocks: Any, opened: int) -> int:
        """Hold a range that an earlier job put through the model; `opened` as in `forward`.

        Returns:
            How often it went on from a checkpoint.
        """
        given, job = as_tensors(earlier), self._in_phases()
        self._guarded(partial(job.resume, part, given, blocks))
        self._ranges.add(part.index)
        return job.resumed(part)

    def replay(self, part: Range, cotangents: RangeCotangents) -> Any:
        """Replay a range, whose sums stay here; returns its `RangeGradient` of buffers."""
        given = as_tensors(cotangents)
        return as_buffers(self._guarded(partial(self._in_phases(part.index).replay, part, given)))

    def check(self, part: Range, norms: Any) -> int:
        """Check the first shard of a range, and give the range up.

        Returns:
            Of how many shards graphs are kept for a later job.
        """
        given = as_tensors(norms)
        return self._guarded(partial(self._in_phases(part.index).check, part, given))

    def take_sums(self, index: int) -> Any:
        """Give the sums of a range away, as buffers."""
        return self._in_phases(index).take_sums(index)

    def add(self, index: int, other: Any) -> int:
        """Add sums that another device gave away to those of a range; returns their bytes."""
        return self._guarded(partial(self._in_phases(index).add, index, other))

    def stored_sums(self, index: int) -> StoredSums:
        """Round the sums of a range as the result has them; returns their forms."""
        return self._guarded(partial(self._in_phases(index).stored_sums, index))

    def write_sums(self, index: int, placement: Placement) -> bool:
        """Write the sums of a range into the result file; False if it is not seen here."""
        return self._guarded(partial(self._in_phases(index).write_sums, index, placement))

    def count(self, part: Range, blocks: Any, of_others: bool, opened: int) -> tuple[int, ...]:
        """Count the samples of each shard of a range; `opened` as in `forward`."""
        count = self._of_samples().count
        return self._guarded(partial(count, part, blocks, of_others=of_others))

    def smaller(
        self, part: Range, task: Any, shared: SharedBySamples, blocks: Any, opened: int
    ) -> bool:
        """Return whether a range is to keep factors."""
        return self._guarded(partial(self._of_samples().smaller, part, task, shared, blocks))

    def run_samples(
        self, part: Range, task: Any, shared: SharedBySamples, blocks: Any, opened: int
    ) -> SampleAnswer:
        """Compute a range of samples."""
        found = self._guarded(partial(self._of_samples().run, part, task, shared, blocks))
        self._ranges.add(part.index)
        return found

    def factors(self, index: int) -> FactorBuffers:
        """Return the factors of a range, which stay here too."""
        return self._of_samples(index).factors(index)

    def gram(self, left: Any, right: Any, trace: bool) -> tuple[Any, int]:
        """Multiply the rows of ranges, of which other devices' come as buffers; and their bytes."""
        held = self._of_samples(*(rows for rows in (left, right) if isinstance(rows, int)))
        gram = self._guarded(partial(held.gram, left, right, trace=trace))
        return gram, num_bytes([left, right])

    def empty(self) -> float | None:
        """Drop what a job holds here, but graphs for a later one.

        Returns:
            In how many seconds `drop_idle_graphs` is to be called; None if there are none.
        """
        if self._leaving:
            os._exit(0)  # with no tensor freed, see `Caught`
        self._close()
        self._abandoned = False
        self._news.clear()
        return self._device.kept.idle_left_s()

    def drop_idle_graphs(self) -> None:
        """Drop graphs that have waited long enough for a job."""
        if self._held is None and self._device.kept.idle_left_s() == 0:
            self._device.kept.drop()

    def news(self) -> list[str]:
        """Return what was told since the last call."""
        return [self._news.popleft().model_dump_json() for _ in range(len(self._news))]

    def take_rows(self, wait_s: float) -> list[Handed]:
        """Return dense rows that are to be written elsewhere, after waiting for some."""
        held = self._held
        if isinstance(held, OpenSamples):
            return held.outlet.taken(wait_s=wait_s)
        time.sleep(min(wait_s, OPENING_S))  # it is being opened, or was ended
        return []

    def place_rows(self, placement: Placement | None) -> None:
        """Tell where dense rows are to be written; None: elsewhere."""
        held = self._held
        if isinstance(held, OpenSamples):
            held.outlet.place(placement)

    def holds(self, job_id: str, attempt: int) -> bool:
        """Return whether an attempt is open here, for ranges."""
        return self._open_for == (job_id, attempt)

    def stop(self, job_id: str, attempt: int) -> None:
        """Have an attempt stop before its next shard."""
        self._stopped = (job_id, attempt)

    def stop_all(self) -> None:
        """Have whatever runs stop before its next shard, up to the next `empty`."""
        self._abandoned = True

    def _supervision(self, job_id: str, attempt: int) -> Supervision:
        def stop_requested() -> bool:
            return self._abandoned or self._stopped == (job_id, attempt)

        return _News(self._news.append, stop_requested)

    def _in_phases(self, *ranges: int) -> OpenJob:
        return self._holding(OpenJob, ranges)

    def _of_samples(self, *ranges: int) -> OpenSamples:
        return self._holding(OpenSamples, ranges)

    def _holding(self, kind: type[T], ranges: Collection[int]) -> T:
        """Return the open job, with these ranges: those of a process that died are not here."""
        if not isinstance(self._held, kind) or not self._ranges.issuperset(ranges):
            raise JobStopped("the device was made empty meanwhile")
        return self._held

    def _close(self) -> None:
        held, self._held, self._open_for = self._held, None, None
        self._ranges.clear()
        if held is not None:
            held.close()

    def _guarded(self, call: Callable[[], T]) -> T:
        """Call what computes for a job; what it raises goes to the coordinator."""
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


class _News:
    """The supervision of a job: tells of its progress now and then."""

    def __init__(
        self, tell: Callable[[FromDevice], None], stop_requested: Callable[[], bool]
    ) -> None:
        self.stop_requested = stop_requested
        self._tell = tell
        self._phase = ""
        self._told_at = 0.0

    def progress(self, phase: str, done: int, total: int) -> None:
        now = time.monotonic()
        if phase != self._phase or now - self._told_at >= REPORT_S:
            self._phase, self._told_at = phase, now
            self._tell(ProgressMade(phase=phase, done=done, total=total))

    def phase_ended(self, phase: str, *, began_s: float, ended_s: float) -> None:
        self._tell(PhaseTimed(phase=phase, began_s=began_s, ended_s=ended_s))
