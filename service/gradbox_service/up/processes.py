"""The child processes of a box: its parts, which are kept running, and the script of --exec.

Unless it is said otherwise, none outlives the process that started it.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from gradbox.cli.exits import WRONG_USAGE
from gradbox.errors import GradboxError

_PR_SET_PDEATHSIG = 1
FIRST_PAUSE_S: Final = 0.5
LONGEST_PAUSE_S: Final = 5.0
TAIL_LINES: Final = 12
# A longer log is put aside, at most so much of it; the log that was put aside before goes.
LONGEST_LOG_BYTES: Final = 8 * 2**20
STOP_S: Final = 10.0
# What a shell returns for a process that a signal ended.
SIGNALLED: Final = 128


def die_with_parent(number: signal.Signals | None) -> Callable[[], None] | None:
    """Return a `preexec_fn` after which the kernel signals the child when its parent dies, if so.

    The parent is the thread that starts the child, so that must be the main thread. Only Linux has
    this; elsewhere the result is None, and what `kill -9` of the parent leaves is stopped when the
    next one starts on the same data.
    """
    if sys.platform != "linux" or number is None:
        return None
    # Looked up before the fork: the child may not take the locks that loading a library takes.
    prctl = ctypes.CDLL(None).prctl
    parent = os.getpid()

    def arrange() -> None:
        prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)
        if os.getppid() != parent:  # it died between the fork and the line above
            os.kill(os.getpid(), number)

    return arrange


class PartFailed(GradboxError):
    """A part ended before jobs could run; it is the user's to mend if it said wrong usage."""

    code = "part-failed"
    title = "A part of the box did not start"

    @classmethod
    def of(cls, part: Part, what: str, *, code: int) -> PartFailed:
        """Say of a part how it ended, with its last lines."""
        found = cls(f"{part.name} {what}. Its last lines (all of them: {part.log}):\n{part.tail()}")
        found.category = "user" if code == WRONG_USAGE else "server"
        return found


class Part:
    """A child process with its log, started again when it ends.

    It runs in a session of its own, so that Ctrl-C reaches the supervisor alone.

    Attributes:
        name: what messages call it.
        log: where its output goes.
        started_s: when it was last started, by the monotonic clock.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        log: Path,
        pass_fds: Sequence[int] = (),
        prepare: Callable[[], None] | None = None,
        with_parent: signal.Signals | None = signal.SIGKILL,
    ) -> None:
        """Describe the process; `start` starts it.

        Args:
            prepare: what is to be done before each start; it may raise a GradboxError.
            with_parent: what ends the process when the supervisor dies; None: it goes on.
        """
        self.name = name
        self.log = log
        self._command = command
        self._pass_fds = tuple(pass_fds)
        self._prepare = prepare
        self._with_parent = with_parent
        self._process: subprocess.Popen[bytes] | None = None
        self.started_s = 0.0
        self._log_start = 0
        self._num_failures = 0
        self._restart_s: float | None = None

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    def start(self) -> None:
        """Start the process."""
        if self._prepare is not None:
            self._prepare()
        self.log.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        rotate(self.log)
        descriptor = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            self._log_start = os.lseek(descriptor, 0, os.SEEK_END)
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=descriptor,
                stderr=descriptor,
                pass_fds=self._pass_fds,
                start_new_session=True,
                preexec_fn=die_with_parent(self._with_parent),
            )
        finally:
            os.close(descriptor)
        self.started_s = time.monotonic()

    def exit_code(self) -> int | None:
        """Return how the process ended (below zero: by that signal), or None while it runs."""
        return None if self._process is None else self._process.poll()

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def keep_running(self) -> str | None:
        """Start the process again, some time after it ended; returns a sentence when it ended."""
        code = self.exit_code()
        if code is None:
            return None
        if self._restart_s is None:
            return self._start_later(f"{self.name} {ended(code)}")
        if time.monotonic() >= self._restart_s:
            self._restart_s = None
            try:
                self.start()
            except GradboxError as error:  # for one because the disk is full: that passes
                return self._start_later(str(error))
        return None

    def _start_later(self, why: str) -> str:
        pause_s = 0.0  # one that was ready and was killed is wanted at once
        if self._num_failures:
            pause_s = min(FIRST_PAUSE_S * 2 ** (self._num_failures - 1), LONGEST_PAUSE_S)
        self._num_failures += 1
        self._restart_s = time.monotonic() + pause_s
        return f"{why}; starting it again in {pause_s:.1f} s (log: {self.log})"

    def settle(self) -> None:
        """Note that the process was ready: its next restart is quick again."""
        self._num_failures = 0

    def signal(self, number: signal.Signals) -> None:
        """Send a signal, if the process runs."""
        if self._process is not None and self.running:
            self._process.send_signal(number)

    def stop(self, *, within_s: float) -> None:
        """End the process, if it runs: by SIGTERM, and by SIGKILL when time is up."""
        if self._process is not None:
            end(self._process, within_s=within_s)

    def lines(self) -> list[str]:
        """Return the lines that the process wrote since it was started, or its log was rotated."""
        with self.log.open("rb") as file:
            is_whole = os.fstat(file.fileno()).st_size >= self._log_start  # and was not rotated
            file.seek(self._log_start if is_whole else 0)
            return file.read().decode(errors="replace").splitlines()

    def tail(self) -> str:
        """Return the last of these lines, indented."""
        return "\n".join(f"  | {line}" for line in self.lines()[-TAIL_LINES:])


def ended(code: int) -> str:
    """Say how a process ended."""
    if code < 0:
        return f"was ended by {signal.Signals(-code).name}"
    return f"ended with exit code {code}"


def of_module(module: str, *arguments: str) -> list[str]:
    """Return the command that runs a module with this Python."""
    return [sys.executable, "-m", module, *arguments]


def end(process: subprocess.Popen[bytes], *, within_s: float) -> None:
    """End a process that may run: by SIGTERM, and by SIGKILL when time is up."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(within_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def rotate(log: Path) -> None:
    """Put a log aside that is long, also while a process writes to it.

    Who writes to it keeps its descriptor, so the log is read and emptied; what is written between
    the two is lost. It is emptied before its end is kept, since it may have filled the disk.
    """
    size_bytes = log.stat().st_size if log.exists() else 0
    if size_bytes <= LONGEST_LOG_BYTES:
        return
    with log.open("rb") as file:
        file.seek(size_bytes - LONGEST_LOG_BYTES)
        kept = file.read(LONGEST_LOG_BYTES)
    os.truncate(log, 0)
    with suppress(OSError):  # on a full disk the box matters more than its log
        log.with_suffix(".log.1").write_bytes(kept)


class Script:
    """A shell command that finds the box by its environment. It shares the terminal with `up`.

    Its files are its user's: it has the umask that `up` was started with.
    """

    def __init__(self, command: str, *, umask: int = -1) -> None:
        self.command = command
        self._umask = umask
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, *, url: str, token: str, data: Path) -> None:
        """Run it with GRADBOX_URL, GRADBOX_TOKEN and GRADBOX_DATA set."""
        box = {"GRADBOX_URL": url, "GRADBOX_TOKEN": token, "GRADBOX_DATA": str(data)}
        self._process = subprocess.Popen(
            self.command,
            shell=True,
            env={**os.environ, **box},
            umask=self._umask,
            preexec_fn=die_with_parent(signal.SIGTERM),
        )

    def exit_code(self) -> int | None:
        """Return how it ended, as a shell says it; None while it runs or before it was started."""
        code = None if self._process is None else self._process.poll()
        return code if code is None or code >= 0 else SIGNALLED - code

    def stop(self) -> int:
        """End it, if it runs, and return its exit code; 0 if it was never started."""
        if self._process is None:
            return 0
        end(self._process, within_s=STOP_S)
        return self.exit_code() or 0
