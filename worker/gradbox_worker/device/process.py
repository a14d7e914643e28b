"""The worker's side of its device process: starting it, asking it, and noticing its death.

The process is started afresh (never forked: a CUDA context does not survive a fork) and keeps the
models between jobs. When it dies, the job it ran ends as `Died` and the next one starts another.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final

from gradbox.protocol import ModelView
from gradbox_worker.device.messages import (
    FromDevice,
    ProgressMade,
    Ready,
    Run,
    RunFailed,
    RunFinished,
    RunStopped,
    Stop,
    Unready,
    receive_answer,
    send,
)
from gradbox_worker.device.work import (
    Died,
    Failed,
    Finished,
    Outcome,
    Stopped,
    Supervision,
    Work,
)

log = logging.getLogger(__name__)

POLL_S: Final = 0.2
LEAVE_S: Final = 5.0  # to end by itself, once told or once it said so


class DeviceNotStarted(RuntimeError):
    """The device process ended before its models were loaded; the message says why."""


@dataclass(frozen=True)
class DeviceSettings:
    """What a device process is started with."""

    models_file: Path
    data: Path  # the folder with the blobs
    device: str = "auto"  # auto | cpu | cuda:N | mps
    model_memory_bytes: int | None = None  # of weights kept on the device; None: half of it
    result_memory_bytes: int | None = None  # of a result on its way to disk; None: an eighth


class DeviceProcess:
    """A device in a process of its own."""

    def __init__(self, settings: DeviceSettings) -> None:
        """Start nothing yet."""
        self._settings = settings
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._models: list[ModelView] = []
        self._placement = settings.device

    @property
    def models(self) -> list[ModelView]:
        """The models it offers; empty before it has started for the first time."""
        return self._models

    @property
    def placement(self) -> str:
        """The device it computes on; before it has started, the one asked for."""
        return self._placement

    @property
    def pid(self) -> int | None:
        """The process, or None if none runs."""
        return (
            None if self._process is None or self._process.poll() is not None else self._process.pid
        )

    def ensure(self, *, while_waiting: Callable[[], object] = lambda: None) -> None:
        """Have a process that runs and has loaded its models.

        Args:
            while_waiting: called every 0.2 s until then, to keep leases and heartbeats alive.

        Raises:
            DeviceNotStarted: it ended before that, or a model cannot be loaded.
        """
        if self.pid is not None:
            return
        self.close()
        self._start()
        answer = self._next_answer(while_waiting)
        if isinstance(answer, Ready):
            self._models, self._placement = answer.models, answer.placement
            log.info("device process %s is ready with %d models", self.pid, len(answer.models))
            return
        if isinstance(answer, Unready):
            reason = answer.problem.detail
        else:
            reason = f"the device process ended before it was ready: {self._how_it_ended()}"
        self.close()
        raise DeviceNotStarted(reason)

    def run(self, work: Work, supervision: Supervision) -> Outcome:
        """Run a job to its end, starting the process first if none runs.

        Raises:
            DeviceNotStarted: none runs, and none can be started.
        """
        self.ensure(while_waiting=supervision.poll)
        order = Run(
            job_id=work.job_id,
            attempt=work.attempt,
            model=work.model,
            model_version=work.model_version,
            spec=work.spec,
            result_path=work.result_path,
            forward_result=work.forward_result,
            queued_s=work.queued_s,
            disk_reserve_bytes=work.disk_reserve_bytes,
        )
        assert self._connection is not None  # since ensure
        try:
            send(self._connection, order)
        except OSError:
            return Died(self._how_it_ended())
        try:
            return self._outcome(work, supervision)
        except BaseException:
            self.kill()  # or its answer to this job would be taken for one to the next
            self.close()
            raise

    def kill(self) -> None:
        """End the process at once, with those it started; a job it runs ends as `Died`."""
        if self._process is not None and self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)

    def close(self) -> None:
        """End the process and wait until it is gone."""
        if self._connection is not None:
            self._connection.close()  # the process ends at the end of its input
            self._connection = None
        if self._process is not None:
            try:
                self._process.wait(LEAVE_S)
            except subprocess.TimeoutExpired:
                self.kill()
                self._process.wait()
            self._process = None

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        settings = self._settings
        command = [sys.executable, "-m", "gradbox_worker.device.main"]
        command += ["--fd", str(theirs.fileno()), "--parent", str(os.getpid())]
        command += ["--models", str(settings.models_file), "--data", str(settings.data)]
        command += ["--device", settings.device]
        if settings.model_memory_bytes is not None:
            command += ["--model-memory-bytes", str(settings.model_memory_bytes)]
        if settings.result_memory_bytes is not None:
            command += ["--result-memory-bytes", str(settings.result_memory_bytes)]
        with theirs:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=2,  # what a model prints goes to the worker's log
                pass_fds=[theirs.fileno()],
                # Ctrl-C on the terminal is the worker's business; and a group can be killed whole.
                start_new_session=True,
            )
        self._connection = Connection(ours.detach())

    def _outcome(self, work: Work, supervision: Supervision) -> Outcome:
        kill_at: float | None = None

        def watch() -> None:
            nonlocal kill_at
            order = supervision.poll()
            if order is not None and kill_at is None:
                kill_at = time.monotonic() + order.grace_s
                self._tell_to_stop(work)
            if kill_at is not None and time.monotonic() >= kill_at:
                log.warning("job %s does not stop: killing the device process", work.job_id)
                self.kill()

        while True:
            answer = self._next_answer(watch)
            match answer:
                case ProgressMade():
                    supervision.progress(answer.phase, answer.done, answer.total)
                case RunFinished():
                    return Finished(answer.receipt, answer.result)
                case RunFailed():
                    if answer.leaving:
                        self.close()
                    return Failed(answer.problem)
                case RunStopped():
                    return Stopped()
                case _:
                    reason = self._how_it_ended()
                    return Died(reason) if kill_at is None else Stopped(killed=True)

    def _next_answer(self, while_waiting: Callable[[], object]) -> FromDevice | None:
        """Wait for the next message; None if the process ended instead."""
        assert self._connection is not None
        while True:
            # Between messages too: a device that reports often must not keep the worker busy.
            while_waiting()
            try:
                if self._connection.poll(POLL_S):
                    return receive_answer(self._connection)
                # A process that a model started may hold the pipe open after the device's death.
                if self.pid is None and not self._connection.poll():
                    return None
            except (EOFError, OSError):
                return None

    def _tell_to_stop(self, work: Work) -> None:
        assert self._connection is not None
        try:
            send(self._connection, Stop(job_id=work.job_id, attempt=work.attempt))
        except OSError:
            log.info("job %s: its device process is gone already", work.job_id)

    def _how_it_ended(self) -> str:
        assert self._process is not None
        try:
            code = self._process.wait(LEAVE_S)
        except subprocess.TimeoutExpired:
            return "it closed its end of the pipe"
        finally:
            self.close()
        return describe_exit(code)


def describe_exit(code: int) -> str:
    """Say how a process ended, as a clause.

    Args:
        code: its exit code, or minus the signal that ended it.
    """
    if code >= 0:
        return f"it exited with code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    hints = {
        "SIGKILL": ", perhaps by the kernel for lack of memory",
        "SIGSEGV": ": a crash in native code",
        "SIGABRT": ": an abort in native code",
        "SIGBUS": ": a crash in native code, or a file that shrank while it was read",
    }
    return f"it was killed by {name}{hints.get(name, '')}"
