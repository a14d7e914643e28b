"""The worker's side of its device: having a process that is ready, and running a job on it.

The process keeps the models between jobs. When it dies, the job it ran ends as `Died` and the next
one has another, which loads a model when the first job needs it: the models are known from the
process before it, as long as the models file is the same. A process that is killed before it is
ready is started again, after a pause that grows; one that meets a fault of its own twice is not.
A model that ends the process that builds it, or is not built in time, is left out, and the others
are served.

Importing torch takes seconds, so a device process is forked from a template that has done that, and
that outlives it. A template that dies is started again; one that says that it cannot be forked is
given up, and each device process then starts by itself.
"""

from __future__ import annotations

import hashlib
import logging
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from gradbox.protocol import DeviceMemory, ModelBuild, ModelView
from gradbox_worker.device.builds import Builds
from gradbox_worker.device.child import POLL_S, DeviceChild, DeviceSettings
from gradbox_worker.device.exits import OUT_OF_MEMORY, Exit
from gradbox_worker.device.messages import (
    Begin,
    Building,
    DeviceReady,
    DeviceUnready,
    MemoryMeasured,
    PhaseTimed,
    ProgressMade,
    Run,
    RunFailed,
    RunFinished,
    RunLost,
    RunStopped,
    Unforked,
)
from gradbox_worker.device.output import BoundedLog
from gradbox_worker.device.template import Template
from gradbox_worker.errors import DeviceNotStarted
from gradbox_worker.models import read_models_file
from gradbox_worker.work import Died, Failed, Finished, Outcome, Stopped, Supervision, Work

log = logging.getLogger(__name__)

# Between one start that failed and the next; a process that was ready begins anew.
START_PAUSES_S: Final = (0.0, 0.25, 0.5, 1.0, 2.0, 5.0, 5.0)


class DeviceProcess:
    """A device in a process of its own."""

    def __init__(self, settings: DeviceSettings, *, log: BoundedLog | None = None) -> None:
        """Start nothing yet.

        Args:
            log: the one that `settings` name, where it is open already.
        """
        self.settings = settings
        self.log = log
        if log is None and settings.log is not None:
            self.log = BoundedLog(settings.log)
        self._child: DeviceChild | None = None
        self._template: Template | None = None
        # Elsewhere a copy of a process that has imported torch may not work.
        self._forks = settings.template and sys.platform == "linux" and settings.cluster is None
        self._ready = False  # whether the child said that jobs can run
        self._models: list[ModelView] = []
        self._models_file_digest = ""  # of the file that they were described from
        self._builds = Builds(timeout_s=settings.build_timeout_s)  # before the child is ready
        self.reloads = 0  # of the models, that had been asked for when they were read
        self.placement = settings.device  # once it has started, the device it computes on
        self.hardware = ""  # what the device calls itself, once it is ready
        self.memory: DeviceMemory | None = None  # what was last measured in it

    @property
    def models(self) -> list[ModelView]:
        """The models it offers; empty before it has started for the first time."""
        return self._models

    @property
    def building(self) -> ModelBuild | None:
        """The model that is being built before the process is ready."""
        return self._builds.current

    @property
    def pid(self) -> int | None:
        """The process, or None if none runs."""
        return None if self._child is None else self._child.pid

    @property
    def ready(self) -> bool:
        """Whether a process runs that has said that jobs can run."""
        return self._ready and self.pid is not None

    def ensure(self, *, while_waiting: Callable[[], object] = lambda: None) -> None:
        """Have a process that runs and is ready for jobs.

        Args:
            while_waiting: called every 0.2 s until then, to keep leases and heartbeats alive. What
                it raises comes through; the process goes on starting, and the next call waits on.

        Raises:
            DeviceNotStarted: starting it failed again and again.
        """
        faults: set[str] = set()
        pauses = iter(START_PAUSES_S)
        while not self.ready:
            num_known = len(self._models)
            ended = self._try_to_start(while_waiting)
            if ended is None:
                return
            if len(self._models) > num_known:  # a model was left out: the next start is another
                pauses = iter(START_PAUSES_S)
            pause_s = next(pauses, None)
            if pause_s is None or ended.fault in faults:
                raise DeviceNotStarted(
                    f"the device process ended again and again before it was ready: the last time "
                    f"{ended.reason}; {self.settings.log or 'the lines above'} may say more"
                )
            if ended.fault is not None:
                faults.add(ended.fault)
            log.warning("%s before it was ready; starting it again in %g s", ended.reason, pause_s)
            _pause(pause_s, while_waiting)

    def reload(
        self,
        number: int,
        *,
        tried: DeviceProcess | None = None,
        while_waiting: Callable[[], object] = lambda: None,
    ) -> None:
        """Have a new process that has read the models file and all that it names again.

        Args:
            number: how many reloads were asked for, with this one.
            tried: one that has tried the models: this one need not, and builds each when a job
                needs it.
            while_waiting: as for `ensure`.

        Raises:
            ModelsFileError: the file cannot be read; the process and its models are as before.
            DeviceNotStarted: see `ensure`.
        """
        read_models_file(self.settings.models_file)
        self._end_child()
        self._models, self._models_file_digest = [], ""
        if tried is not None:
            self._models, self._models_file_digest = tried.models, tried._models_file_digest
        self.reloads = number
        self.ensure(while_waiting=while_waiting)

    def have_template(self) -> None:
        """Start a template if there is to be one and none lives; done before each start, too."""
        if self._forks and (self._template is None or self._template.pid is None):
            self._end_template()
            self._template = Template(self.settings.options(), log=self.log)

    def run(self, work: Work, supervision: Supervision) -> Outcome:
        """Run a job to its end, starting the process first if none runs.

        Raises:
            DeviceNotStarted: none runs, and none can be started.
        """
        while True:
            self.ensure(while_waiting=supervision.poll)
            child = self._child
            assert child is not None  # since ensure
            try:
                child.send(Run(work=work))
            except OSError:
                return Died(child.end().reason)
            try:
                outcome = self._outcome(child, work, supervision)
            except BaseException:
                self.kill()  # or its answer to this job would be taken for one to the next
                self._end_child()
                raise
            if outcome is not None:
                return outcome

    def kill(self) -> None:
        """End the process at once, with those it started; a job it runs ends as `Died`."""
        if self._child is not None:
            self._child.kill()

    def close(self) -> None:
        """End the process and what it started, and the template; wait until all are gone."""
        self._end_child()
        self._end_template()

    def _end_child(self) -> None:
        self._ready = False
        if self._child is not None:
            self._child.end()
            self._child = None

    def _end_template(self) -> None:
        if self._template is not None:
            self._template.end()
            self._template = None

    def _try_to_start(self, while_waiting: Callable[[], object]) -> Exit | None:
        """Have a process say that it is ready; returns how it ended if it did so before.

        Raises:
            DeviceNotStarted: it says itself that it cannot be used.
        """
        child = self._child
        if child is None or child.over:
            self._end_child()
            self._child = child = self._started()

        def watch() -> None:
            while_waiting()
            if self._builds.overdue():
                child.kill()

        while isinstance(answer := child.next_answer(watch), Building):
            self._builds.begins(answer.model)
        match answer:
            case DeviceReady():
                self._ready, self.placement = True, answer.placement
                self._builds.over()
                self.hardware, self.memory = answer.hardware, answer.memory
                self._models += answer.models
                log.info("device process %s is ready with %d models", child.pid, len(self._models))
                return None
            case DeviceUnready():
                self._end_child()
                raise DeviceNotStarted(answer.problem.detail)
            case Unforked():
                self._forks = False
                self._end_child()
                self._end_template()
                return Exit(f"it cannot be forked: {answer.reason}", fault=None)
        ended = child.end()
        self._end_child()
        left_out = self._builds.left_out_after(ended)
        if left_out is None:
            return ended
        self._models.append(left_out)
        return Exit(ended.reason, fault=None)

    def _started(self) -> DeviceChild:
        digest = _digest(self.settings.models_file)
        if digest != self._models_file_digest:
            self._models, self._models_file_digest = [], digest
        first = Begin(
            known={view.name: view.version for view in self._models if view.usable},
            unusable={view.name: view.reason for view in self._models if not view.usable},
            reloads=self.reloads,
        )
        self.have_template()
        return DeviceChild(self.settings, first, template=self._template, log=self.log)

    def _outcome(self, child: DeviceChild, work: Work, supervision: Supervision) -> Outcome | None:
        """Wait for a job's end; None if the process left before it began the job."""
        kill_at: float | None = None
        progress: ProgressMade | None = None

        def watch() -> None:
            nonlocal kill_at
            order = supervision.poll()
            if order is not None and kill_at is None:
                kill_at = time.monotonic() + order.grace_s
                child.ask_to_stop(work.job_id, work.attempt)
            if kill_at is not None and time.monotonic() >= kill_at:
                log.warning("job %s does not stop: killing the device process", work.job_id)
                child.kill()

        while True:
            answer = child.next_answer(watch)
            match answer:
                case ProgressMade():
                    progress = answer
                    supervision.progress(answer.phase, answer.done, answer.total)
                case PhaseTimed():
                    supervision.phase_ended(
                        answer.phase, began_s=answer.began_s, ended_s=answer.ended_s
                    )
                case MemoryMeasured():
                    self.memory = answer.memory
                case RunFinished():
                    return Finished(answer.result)
                case RunFailed():
                    if answer.leaving:
                        self._end_child()
                    return Failed(answer.problem)
                case RunStopped():
                    return Stopped()
                case RunLost():
                    if answer.leaving:
                        self._end_child()
                    ended = Exit(answer.reason, fault=answer.fault)
                    return _died(ended, progress) if answer.begun else None
                case _:
                    ended = child.end()
                    self._end_child()
                    return _died(ended, progress) if kill_at is None else Stopped()


def _died(ended: Exit, progress: ProgressMade | None) -> Died:
    if ended.fault is None:
        return Died(ended.reason)
    where = "before its first shard"
    if progress is not None:
        where = f"in phase {progress.phase!r} after {progress.done} of {progress.total} steps"
    out_of_memory = ended.fault == OUT_OF_MEMORY
    return Died(ended.reason, fault=f"{ended.fault} {where}", out_of_memory=out_of_memory)


def _digest(path: Path) -> str:
    """Return a file's digest; that of nothing if there is no file, as the device will say."""
    return hashlib.sha256(path.read_bytes() if path.is_file() else b"").hexdigest()


def _pause(seconds: float, while_waiting: Callable[[], object]) -> None:
    until = time.monotonic() + seconds
    while (left := until - time.monotonic()) > 0:
        while_waiting()
        time.sleep(min(POLL_S, left))
