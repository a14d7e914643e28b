"""One device process, as the worker started it: its pipe, its death, and what it leaves behind."""

from __future__ import annotations

import os
import secrets
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final

from pydantic import TypeAdapter

from gradbox_worker.device.descendants import MARK, Guardian, end_descendants
from gradbox_worker.device.exits import Exit, count_oom_kills, exit_of
from gradbox_worker.device.messages import (
    Begin,
    Forked,
    FromDevice,
    Stop,
    ToDevice,
    receive_answer,
    send,
)
from gradbox_worker.device.output import BoundedLog, Output
from gradbox_worker.device.parentage import Adopted, adopt_orphans
from gradbox_worker.device.template import Template

DEVICE_MODULE: Final = "gradbox_worker.device.main"
CLUSTER_MODULE: Final = "gradbox_worker.cluster.coordinator.main"
POLL_S: Final = 0.2
LEAVE_S: Final = 5.0  # to end by itself, once told or once it said so
DRAIN_S: Final = 2.0  # to read what it printed, once it and what it started are gone


@dataclass(frozen=True)
class DeviceSettings:
    """What a device process is started with."""

    models_file: Path
    data: Path  # the folder with the blobs
    device: str = "auto"  # auto | cpu | cuda:N | mps
    num_gpus: int = 1  # from cuda:N on; more than one in a cluster alone
    model_memory_bytes: int | None = None  # of weights kept on the device; None: half of it
    result_memory_bytes: int | None = None  # of a result on its way to disk; None: an eighth
    job_memory_bytes: int | None = None  # what a job may allocate; None: see MemoryLimit
    checkpoint_after_s: float | None = None  # of a job's run; None: see checkpoints.Pace
    log: Path | None = None  # of what it prints; None: the worker's standard error
    template: bool = True  # whether it is forked from one, where there is Linux; see `forking`
    build_timeout_s: float = 600.0  # for a model to be built and tried
    beside: bool = False  # whether another process has the device, and its models; see `trial`
    cluster: Path | None = None  # where a cluster says how it is reached; None: no cluster

    @property
    def module(self) -> str:
        """What the process runs: the device itself, or what has a cluster's devices run jobs."""
        return DEVICE_MODULE if self.cluster is None else CLUSTER_MODULE

    def options(self) -> list[str]:
        """Return them as `gradbox_worker.device.main` reads them."""
        return ["--settings", SETTINGS.dump_json(self).decode()]


SETTINGS: Final = TypeAdapter(DeviceSettings)


class DeviceChild:
    """A process that runs jobs (`DeviceSettings.module`), from its start to its end.

    It is forked from a template, or started by itself. Either way it is this process's child, and
    opens no device and no model before it was sent `Begin`.
    """

    def __init__(
        self,
        settings: DeviceSettings,
        first: Begin,
        *,
        template: Template | None = None,
        log: BoundedLog | None = None,
    ) -> None:
        """Start it.

        Args:
            first: the first message that it gets.
            template: what it is forked from; None: it starts by itself.
            log: where what it prints goes; None: the worker's standard error.
        """
        self._settings = settings
        self._first = first
        self._template = template
        self._mark = secrets.token_hex(16)
        self._process: subprocess.Popen[bytes] | Adopted | None = None  # None: not forked yet
        self._exit: Exit | None = None
        self._num_oom_kills = count_oom_kills()
        self._guardian: Guardian | None = None
        self._output = None if log is None else Output(log)
        output_fd = 2 if self._output is None else self._output.write_fd
        ours, theirs = socket.socketpair()
        self._connection = Connection(ours.detach())
        self._readable = select.poll()  # the connection's own `poll` sets one up at each call
        self._readable.register(self._connection, select.POLLIN)
        with theirs:
            if template is None:
                self._begin(self._started(theirs.fileno(), output_fd))
            else:
                adopt_orphans(True)
                with suppress(OSError):  # it is gone, as the wait for an answer will find
                    template.ask_for_device(
                        self._mark, connection_fd=theirs.fileno(), output_fd=output_fd
                    )
        if self._output is not None:
            self._output.begin()

    @property
    def pid(self) -> int | None:
        """The process, or None if it has ended, or has not been forked yet."""
        return None if self._process is None or self.over else self._process.pid

    @property
    def over(self) -> bool:
        """Whether the process has ended."""
        return self._process is not None and self._process.poll() is not None

    def send(self, message: ToDevice) -> None:
        """Send a message.

        Raises:
            OSError: the process is gone.
        """
        send(self._connection, message)

    def ask_to_stop(self, job_id: str, attempt: int) -> None:
        """Ask that an attempt stop before its next shard; a process that is gone has stopped."""
        with suppress(OSError):
            self.send(Stop(job_id=job_id, attempt=attempt))

    def next_answer(self, while_waiting: Callable[[], object]) -> FromDevice | None:
        """Wait for the next message of the device; None if the process ended instead.

        Of its template's messages only `Unforked` is returned.

        Args:
            while_waiting: called before each wait of at most 0.2 s; what it raises comes through,
                and a later call goes on waiting.
        """
        while True:
            # Between messages too: a device that reports often must not keep the worker busy.
            while_waiting()
            try:
                if self._readable.poll(POLL_S * 1e3):
                    answer = receive_answer(self._connection)
                    if not isinstance(answer, Forked):
                        return answer
                    self._adopt(answer)
                # A process that a model started may hold the pipe open after the device's death.
                elif self.over and not self._readable.poll(0):
                    return None
            except (EOFError, OSError):
                return None

    def kill(self) -> None:
        """End the process at once, with those of its group."""
        if self._process is not None and self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)

    def end(self) -> Exit:
        """Wait until the process and all that it started are gone; kill what does not go.

        Returns:
            How the process ended, also when asked again.
        """
        if self._exit is None:
            self._exit = self._ended()
            if self._process is not None:
                end_descendants(self._process.pid, self._mark)
            if self._guardian is not None:
                self._guardian.dismiss()
            if self._output is not None:
                self._output.end(within_s=DRAIN_S)
        return self._exit

    def _started(self, connection_fd: int, output_fd: int) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", self._settings.module]
        command += ["--fd", str(connection_fd), "--parent", str(os.getpid())]
        return subprocess.Popen(
            [*command, *self._settings.options()],
            stdin=subprocess.DEVNULL,
            stdout=output_fd,
            stderr=output_fd,
            env=os.environ | {MARK: self._mark},
            pass_fds=[connection_fd],
            # Ctrl-C on the terminal is the worker's business; and a group can be killed whole.
            start_new_session=True,
        )

    def _adopt(self, forked: Forked) -> None:
        adopt_orphans(False)
        self._begin(Adopted(forked.pid))

    def _begin(self, process: subprocess.Popen[bytes] | Adopted) -> None:
        """Have a process become the device, and have what it will start guarded from now on."""
        self._process = process
        self._guardian = Guardian(process.pid, self._mark)
        with suppress(OSError):  # it is gone, as the wait for an answer will find
            self.send(self._first)

    def _ended(self) -> Exit:
        if self._process is None and (unforked := self._unforked()) is not None:
            return unforked
        assert self._process is not None
        self._connection.close()  # a process that is idle ends at the end of its input
        try:
            code = self._process.wait(LEAVE_S)
        except subprocess.TimeoutExpired:
            self.kill()
            self._process.wait()
            return Exit("it closed its end of the pipe, or did not end in time", fault=None)
        return exit_of(code, num_oom_kills=count_oom_kills() - self._num_oom_kills)

    def _unforked(self) -> Exit | None:
        """End the template, and return how it ended; None if it had forked the process by then."""
        assert self._template is not None  # else there is a process
        ended = self._template.end()
        with suppress(EOFError, OSError):
            if self._connection.poll() and isinstance(
                answer := receive_answer(self._connection), Forked
            ):
                self._adopt(answer)
                return None
        adopt_orphans(False)
        self._connection.close()
        return ended
