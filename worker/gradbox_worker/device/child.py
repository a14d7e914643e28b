"""One device process, as the worker started it: its pipe, its death, and what it leaves behind."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final

from gradbox_worker.device.descendants import MARK, Guardian, end_descendants
from gradbox_worker.device.exits import Exit, count_oom_kills, exit_of
from gradbox_worker.device.messages import Begin, FromDevice, ToDevice, receive_answer, send
from gradbox_worker.device.output import BoundedLog, Output

DEVICE_MODULE: Final = "gradbox_worker.device.main"
CLUSTER_MODULE: Final = "gradbox_worker.cluster.main"
POLL_S: Final = 0.2
LEAVE_S: Final = 5.0  # to end by itself, once told or once it said so
DRAIN_S: Final = 2.0  # to read what it printed, once it and what it started are gone


@dataclass(frozen=True)
class DeviceSettings:
    """What a device process is started with."""

    models_file: Path
    data: Path  # the folder with the blobs
    device: str = "auto"  # auto | cpu | cuda:N | mps
    model_memory_bytes: int | None = None  # of weights kept on the device; None: half of it
    result_memory_bytes: int | None = None  # of a result on its way to disk; None: an eighth
    job_memory_bytes: int | None = None  # what a job may allocate; None: see MemoryLimit
    checkpoint_after_s: float | None = None  # of a job's run; None: see checkpoints.Pace
    log: Path | None = None  # of what it prints; None: the worker's standard error
    spare: bool = False  # whether a second process waits to take its place
    cluster: Path | None = None  # where a cluster says how it is reached; None: no cluster

    @property
    def module(self) -> str:
        """What the process runs: the device itself, or what has a cluster's devices run jobs."""
        return DEVICE_MODULE if self.cluster is None else CLUSTER_MODULE

    def options(self) -> list[str]:
        """Return them as `gradbox_worker.device.main` reads them."""
        options = ["--models", str(self.models_file), "--data", str(self.data)]
        options += ["--device", self.device]
        if self.model_memory_bytes is not None:
            options += ["--model-memory-bytes", str(self.model_memory_bytes)]
        if self.result_memory_bytes is not None:
            options += ["--result-memory-bytes", str(self.result_memory_bytes)]
        if self.job_memory_bytes is not None:
            options += ["--job-memory-bytes", str(self.job_memory_bytes)]
        if self.checkpoint_after_s is not None:
            options += ["--checkpoint-after-s", str(self.checkpoint_after_s)]
        if self.cluster is not None:
            options += ["--cluster", str(self.cluster)]
        return options


class DeviceChild:
    """A process that runs jobs (`DeviceSettings.module`), from its start to its end.

    It is started afresh, never forked: a CUDA context does not survive a fork. It imports all that
    its jobs will need, and then waits: until `begin` it opens no device and no model, and starts
    nothing.
    """

    def __init__(self, settings: DeviceSettings, *, log: BoundedLog | None = None) -> None:
        """Start it.

        Args:
            log: where what it prints goes; None: the worker's standard error.
        """
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-m", settings.module]
        command += ["--fd", str(theirs.fileno()), "--parent", str(os.getpid())]
        self._mark = secrets.token_hex(16)
        self._exit: Exit | None = None
        self._num_oom_kills = count_oom_kills()
        self._guardian: Guardian | None = None
        self._output = None if log is None else Output(log)
        printed = 2 if self._output is None else self._output.write_fd
        with theirs:
            self._process = subprocess.Popen(
                [*command, *settings.options()],
                stdin=subprocess.DEVNULL,
                stdout=printed,
                stderr=printed,
                env=os.environ | {MARK: self._mark},
                pass_fds=[theirs.fileno()],
                # Ctrl-C on the terminal is the worker's business; and a group can be killed whole.
                start_new_session=True,
            )
        if self._output is not None:
            self._output.begin()
        self._connection = Connection(ours.detach())

    @property
    def pid(self) -> int | None:
        """The process, or None if it has ended."""
        return None if self._process.poll() is not None else self._process.pid

    def begin(self, *, known: Mapping[str, str], unusable: Mapping[str, str]) -> None:
        """Have it become the device, and have what it will start guarded from now on.

        Args:
            known: see `Begin`.
            unusable: see `Begin`.

        Raises:
            OSError: the process is gone.
        """
        self._num_oom_kills = count_oom_kills()
        self._guardian = Guardian(self._process.pid, self._mark)
        self.send(Begin(known=dict(known), unusable=dict(unusable)))

    def send(self, message: ToDevice) -> None:
        """Send a message.

        Raises:
            OSError: the process is gone.
        """
        send(self._connection, message)

    def next_answer(self, while_waiting: Callable[[], object]) -> FromDevice | None:
        """Wait for the next message; None if the process ended instead.

        Args:
            while_waiting: called before each wait of at most 0.2 s; what it raises comes through,
                and a later call goes on waiting.
        """
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

    def kill(self) -> None:
        """End the process at once, with those of its group."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)

    def end(self) -> Exit:
        """Wait until the process and all that it started are gone; kill what does not go.

        Returns:
            How the process ended, also when asked again.
        """
        if self._exit is None:
            self._exit = self._ended()
            end_descendants(self._process.pid, self._mark)
            if self._guardian is not None:
                self._guardian.dismiss()
            if self._output is not None:
                self._output.end(within_s=DRAIN_S)
        return self._exit

    def _ended(self) -> Exit:
        self._connection.close()  # a process that is idle ends at the end of its input
        try:
            code = self._process.wait(LEAVE_S)
        except subprocess.TimeoutExpired:
            self.kill()
            self._process.wait()
            return Exit("it closed its end of the pipe, or did not end in time", fault=None)
        return exit_of(code, num_oom_kills=count_oom_kills() - self._num_oom_kills)
