"""A device as an actor: the warm device of `device.warm_device`, and ranges of wide jobs.

Calls that compute run one after the other in one thread, for what a job holds between two calls
belongs to its thread. `news`, `stop` and the like run beside them, in a group of their own.
"""

from __future__ import annotations

import logging
import os
import threading
import warnings
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

import ray

from gradbox.printable import log_to_stderr
from gradbox_worker.cluster.array_buffers import as_buffers, as_tensors
from gradbox_worker.cluster.held_range import HeldRange, RangeJob
from gradbox_worker.computations.execution import StopNow
from gradbox_worker.device.child import DeviceSettings
from gradbox_worker.device.importing import import_for_jobs
from gradbox_worker.device.messages import TO_DEVICE, FromDevice, Run, RunFailed
from gradbox_worker.device.warm_device import WarmDevice
from gradbox_worker.exceptions_to_problems import refuses_work

log = logging.getLogger(__name__)

T = TypeVar("T")

CONTROL: Final = "control"
LEAVE_S: Final = 5.0


class JobStopped(Exception):
    """The job was told to stop; `StopNow` as it crosses processes."""


class DeviceActor:
    """One device of a cluster; `head` makes an actor of it."""

    def __init__(self, settings: DeviceSettings, mark: tuple[Path, str]) -> None:
        """Open the device and build its models.

        Args:
            settings: those of a device process.
            mark: a file in the box's data folder, and what stands in it; whoever reads it sees
                the data folder.
        """
        log_to_stderr("device[%(process)d] ")
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        self._news: deque[FromDevice] = deque()
        self._stopped: tuple[str, int] | None = None
        self._held: HeldRange | None = None
        self._mark = mark
        self._device = WarmDevice(settings, tell=self._news.append)
        import_for_jobs()

    def describe(self) -> dict[str, Any]:
        """Say what the device is: its models as JSON, and whether it sees the data folder."""
        path, text = self._mark
        return {
            "models": [view.model_dump_json() for view in self._device.views],
            "placement": self._device.placement,
            "hardware": self._device.hardware,
            "sees_files": path.is_file() and path.read_text() == text,
        }

    def run(self, order: str) -> list[str]:
        """Run a whole job; returns the messages that are left, the outcome last."""
        run = TO_DEVICE.validate_json(order)
        assert isinstance(run, Run)
        answer = self._device.run(run, stop_requested=self._stop_of(run.job_id, run.attempt))
        if isinstance(answer, RunFailed) and answer.leaving:
            self._leave_soon()
        return [*self.news(), answer.model_dump_json()]

    def open(self, job: RangeJob) -> None:
        """Make ready for ranges of a job."""
        self._held = None
        stop_requested = self._stop_of(job.job_id, job.attempt)
        observer = self._device.watched(stop_requested=stop_requested)
        self._held = self._guarded(partial(HeldRange, self._device, job, observer=observer))

    def forward(self, part: Any, shards: Any) -> Any:
        """Run the first pass of a range; returns `RangeOutputs` with buffers for tensors."""
        held = self._holding()
        return as_buffers(self._guarded(lambda: held.forward(part, shards)))

    def replay(self, part: Any, cotangents: Any) -> Any:
        """Replay a range; returns its `RangeGradient`, whose sums are a reference to buffers."""
        held = self._holding()
        return self._guarded(lambda: held.replay(part, as_tensors(cotangents)))

    def added(self, left: Any, right: Any) -> Any:
        """Return two sums added, as buffers."""
        held = self._holding()
        return self._guarded(lambda: held.added(left, right))

    def empty(self) -> None:
        """Drop what a job holds here, and kept graphs that have waited long enough."""
        self._held = None
        if self._device.idle_left_s() == 0:
            self._device.drop_kept_graphs()

    @ray.method(concurrency_group=CONTROL)
    def news(self) -> list[str]:
        """Return what was told since the last call."""
        return [self._news.popleft().model_dump_json() for _ in range(len(self._news))]

    @ray.method(concurrency_group=CONTROL)
    def stop(self, job_id: str, attempt: int) -> None:
        """Have an attempt stop before its next shard."""
        self._stopped = (job_id, attempt)

    def _stop_of(self, job_id: str, attempt: int) -> Callable[[], bool]:
        return lambda: self._stopped == (job_id, attempt)
