"""Parents and children where `subprocess` does not make them.

A process can end with its parent, and a process can become the parent of one that it did not start:
of an orphan below it (Linux, prctl(2)). So a device process that another child of the worker has
forked is the worker's own: the worker hears how it ended, and the device ends with the worker.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from typing import Final

PR_SET_PDEATHSIG: Final = 1
PR_SET_CHILD_SUBREAPER: Final = 36
PAUSE_S: Final = 0.01


def end_with_parent(pid: int) -> None:
    """Have the kernel end this process when its parent ends.

    Raises:
        SystemExit: the parent is not `pid`: that one has ended already.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL))
    if os.getppid() != pid:
        sys.exit("the worker that started this process is gone")


def adopt_orphans(adopt: bool) -> None:
    """Become the parent of processes below this one that lose theirs, or no longer."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, int(adopt))


class Adopted:
    """A child that this process adopted, with what a worker needs of `subprocess.Popen`."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._code: int | None = None

    def poll(self) -> int | None:
        """Return the exit code as `subprocess` gives it, or None while the process runs."""
        if self._code is None:
            try:
                ended, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:  # whoever started this process had it ignore SIGCHLD
                self._code = 0
            else:
                self._code = os.waitstatus_to_exitcode(status) if ended else None
        return self._code

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end of the process and return its exit code.

        Raises:
            subprocess.TimeoutExpired: it runs on after `timeout` seconds.
        """
        until = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if until is not None and time.monotonic() >= until:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
            time.sleep(PAUSE_S)
        return code
