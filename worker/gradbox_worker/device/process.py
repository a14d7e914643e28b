"""The worker's side of a device process: started, looked at, ended, and started again.

The process keeps the models between jobs. The one behind it loads a model when the first job needs
it: the models are known from the process before, as long as the models file is the same. A process
that is killed before it is ready is started again, after a pause that grows; one that meets a fault
of its own twice is not. A model that ends the process that builds it, or is not built in time, is
left out, and the others are served.

Nothing here waits for a process to be ready: `look` is called again and again.
"""

from __future__ import annotations

import hashlib
import logging
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from gradbox.protocol import ModelBuild
from gradbox_service.database.refusals import unless_refused
from gradbox_worker.device.builds import Builds
from gradbox_worker.device.descendants import MARK, Guardian, end_descendants
from gradbox_worker.device.entry import DeviceEntries, DeviceEntry
from gradbox_worker.device.exits import Exit, count_oom_kills, exit_of
from gradbox_worker.device.last_step import JobStep, LastStep, memory_file
from gradbox_worker.device.output import BoundedLog, Output
from gradbox_worker.device.settings import DEVICE_MODULE, START, DeviceSettings, Start, TurnSettings
from gradbox_worker.errors import DeviceNotStarted

log = logging.getLogger(__name__)

# Between one start that failed and the next; a process that was ready begins anew.
START_PAUSES_S: Final = (0.0, 0.25, 0.5, 1.0, 2.0, 5.0, 5.0)
DRAIN_S: Final = 2.0  # to read what it printed, once it and what it started are gone


class DeviceProcess:
    """One device, in one process after the other.

    Attributes:
        settings: of the device.
        log: where what it prints goes; None: the worker's standard error.
        reloads: how many reloads of the models file had been asked for when it is read.
        trial: whether a process that starts tries all models first, beside one that serves.
        models: the versions of the models that are known, by name.
        unusable: why others cannot be built.
    """

    def __init__(
        self,
        settings: DeviceSettings,
        turns: TurnSettings,
        *,
        entries: DeviceEntries,
        log: BoundedLog | None = None,
        reloads: int = 0,
        trial: bool = False,
    ) -> None:
        """Start nothing yet."""
        self.settings, self.log = settings, log
        self.reloads, self.trial = reloads, trial
        self.models: dict[str, str] = {}
        self.unusable: dict[str, str] = {}
        self._turns, self._entries = turns, entries
        self._child: DeviceChild | None = None
        self._entry = DeviceEntry()  # of the child
        self._models_file_digest = ""  # of the file that the models are known from
        self._builds = Builds(timeout_s=settings.build_timeout_s)
        self._start_at_s = 0.0
        self._pauses = _pauses()
        self._faults: set[str] = set()  # of processes that were not ready, since one was

    @property
    def entry(self) -> DeviceEntry:
        """What its process has noted of itself, as last read."""
        return self._entry

    @property
    def pid(self) -> int | None:
        """The process, or None if none runs."""
        return None if self._child is None or self._child.over else self._child.pid

    @property
    def ready(self) -> bool:
        """Whether a process runs that takes turns."""
        return self._child is not None and self._entry.state == "ready"

    @property
    def tried(self) -> bool:
        """Whether a process has tried all models, and waits to be the one that serves."""
        return self._child is not None and self._entry.state == "tried"

    @property
    def building(self) -> ModelBuild | None:
        """The model that is being built before the process is ready."""
        return self._builds.current

    @property
    def last_step(self) -> JobStep | None:
        """The last step of the job that the process runs, or ran when it ended."""
        return None if self._child is None else self._child.step.read()

    def look(self) -> Exit | None:
        """Start a process if it is time to, and read what it has noted.

        Returns:
            How it ended, if it has: again and again until `note_end`. All that it started is gone.

        Raises:
            redis.RedisError: its entry is not read; a later look does.
        """
        if self._child is None:
            if time.monotonic() < self._start_at_s:
                return None
            self._child = self._started()
        child = self._child
        over = child.over  # before its last note is read
        self._read(child)
        if over:
            return child.end()
        if self._builds.overdue():
            child.kill()
        return None

    def note_end(self, ended: Exit) -> None:
        """Decide when the next process is to start, now that the end of this one was dealt with.

        Raises:
            DeviceNotStarted: not at all.
        """
        entry = self._entry
        self.close()
        if entry.problem:
            raise DeviceNotStarted(entry.problem)
        if entry.state == "ready":
            self._start_at_s, self._pauses, self._faults = 0.0, _pauses(), set()
            log.info("the device process ended: %s", ended.reason)
            return
        left_out = self._builds.left_out_after(ended)
        if left_out is not None:  # the next start is another
            self.unusable[left_out.name] = left_out.reason
            self._pauses = _pauses()
        fault = ended.fault if left_out is None else None
        pause_s = next(self._pauses, None)
        if pause_s is None or fault in self._faults:
            raise DeviceNotStarted(
                f"the device process ended again and again before it was ready: the last time "
                f"{ended.reason}; {self.settings.log or 'the lines above'} may say more"
            )
        if fault is not None:
            self._faults.add(fault)
        log.warning("%s before it was ready; starting it again in %g s", ended.reason, pause_s)
        self._start_at_s = time.monotonic() + pause_s

    def signal(self, number: signal.Signals) -> None:
        """Send the process a signal, see `orders`; one that is gone needs none."""
        if self._child is not None and not self._child.over:
            os.kill(self._child.pid, number)

    def kill(self) -> None:
        """End the process at once, with those of its group."""
        if self._child is not None:
            self._child.kill()

    def wait(self, seconds: float) -> None:
        """Wait for so long, or until the process ends."""
        if self._child is None:
            time.sleep(seconds)
        else:
            self._child.wait(seconds)

    def close(self) -> None:
        """Kill the process, and wait until it and all that it started are gone."""
        child, self._child, self._entry = self._child, None, DeviceEntry()
        if child is not None:
            child.kill()
            child.end()
            child.close()
            with unless_refused():  # the next worker of this name forgets all
                self._entries.forget(child.mark)

    def _read(self, child: DeviceChild) -> None:
        entry = self._entries.read(child.mark)
        if entry is None or entry == self._entry:
            return
        if entry.state != self._entry.state:
            self.models, self.unusable = dict(entry.models), dict(entry.unusable)
            log.info("device process %s is %s: %d models", child.pid, entry.state, len(self.models))
        self._entry = entry
        self._builds.note(entry.building)
        if entry.state != "starting":
            self._builds.over()

    def _started(self) -> DeviceChild:
        digest = _digest(self.settings.models_file)
        if digest != self._models_file_digest:
            self.models, self.unusable, self._models_file_digest = {}, {}, digest
        step = LastStep()
        start = Start(
            settings=self.settings,
            turns=self._turns,
            mark=secrets.token_hex(16),
            parent=os.getpid(),
            step_fd=step.fd,
            known=self.models,
            unusable=self.unusable,
            reloads=self.reloads,
            trial=self.trial,
        )
        return DeviceChild(start, step, log=self.log)


class DeviceChild:
    """One process, from its start to its end.

    Attributes:
        mark: what its entry and all that it starts are known by.
        pid: its number.
        step: the last step of its job.
    """

    def __init__(self, start: Start, step: LastStep, *, log: BoundedLog | None) -> None:
        """Start it.

        Args:
            log: where what it prints goes; None: the worker's standard error.
        """
        self.mark, self.step = start.mark, step
        self._exit: Exit | None = None
        self._num_oom_kills = count_oom_kills()
        self._output = None if log is None else Output(log)
        printed = 2 if self._output is None else self._output.write_fd
        parameters = memory_file()
        os.write(parameters, START.dump_json(start))
        os.lseek(parameters, 0, os.SEEK_SET)
        # All that it is to do comes by its standard input; its arguments are for who reads `ps`.
        who = ["--name", start.turns.worker, "--data", str(start.settings.data)]
        self._process = subprocess.Popen(
            [sys.executable, "-m", DEVICE_MODULE, *who],
            stdin=parameters,
            stdout=printed,
            stderr=printed,
            env=os.environ | {MARK: start.mark},
            pass_fds=[step.fd],
            # Ctrl-C on the terminal is the worker's business; and a group can be killed whole.
            start_new_session=True,
        )
        os.close(parameters)
        self.pid = self._process.pid
        self._guardian = Guardian(self.pid, self.mark)
        if self._output is not None:
            self._output.begin()

    @property
    def over(self) -> bool:
        """Whether the process has ended."""
        return self._process.poll() is not None

    def wait(self, seconds: float) -> None:
        """Wait for so long, or until it ends."""
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return

    def kill(self) -> None:
        """End the process at once, with those of its group."""
        if not self.over:
            os.killpg(self.pid, signal.SIGKILL)

    def end(self) -> Exit:
        """Wait until the process, which was killed or ends by itself, and its descendants are gone.

        Returns:
            How the process ended, also when asked again.
        """
        if self._exit is None:
            code = self._process.wait()
            self._exit = exit_of(code, num_oom_kills=count_oom_kills() - self._num_oom_kills)
            end_descendants(self.pid, self.mark)
            self._guardian.dismiss()
            if self._output is not None:
                self._output.end(within_s=DRAIN_S)
        return self._exit

    def close(self) -> None:
        """Forget it, once it has ended."""
        self.step.close()


def _pauses() -> Iterator[float]:
    return iter(START_PAUSES_S)


def _digest(path: Path) -> str:
    """Return a file's digest; that of nothing if there is no file, as the device will say."""
    return hashlib.sha256(path.read_bytes() if path.is_file() else b"").hexdigest()
