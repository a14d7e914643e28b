"""Processes that a device process leaves behind are ended with it.

A model may start processes: a DataLoader's workers, a compiler, a server of its own. They belong to
the device process's session, or, if they have left it, they have inherited a mark in their
environment. `end_descendants` finds both in /proc and kills them.

The worker calls it when its device process has ended. When the worker itself is killed, a guardian
does: a process of the standard library alone (8 MB) that waits for the end of a pipe whose other
end only the worker has. It stands beside worker and device process, in a session of its own, so it
survives when both are killed, together or one after the other.

What has cleared its environment and left the session is not found, nor is anything without /proc
but the device's process group (macOS).
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Final

MARK: Final = "GRADBOX_DEVICE"
PROC: Final = Path("/proc")
PAUSE_S: Final = 0.01
GIVE_UP_S: Final = 5.0


def end_descendants(session: int, mark: str) -> None:
    """Kill every process of a session, or with a mark, and wait until they are gone.

    Args:
        session: the process id of the device process, which leads the session.
        mark: the value of `MARK` in its environment.
    """
    if not PROC.is_dir():
        _kill_group(session)
        return
    deadline = time.monotonic() + GIVE_UP_S
    while (found := _descendants(session, mark)) and time.monotonic() < deadline:
        for pid in found:
            _kill(pid)
        time.sleep(PAUSE_S)


class Guardian:
    """Ends the descendants of one device process when the worker dies."""

    def __init__(self, session: int, mark: str) -> None:
        """Start it; see `end_descendants` for the arguments."""
        self._process = subprocess.Popen(
            # Isolated and without site-packages: this file needs neither, and starts in 20 ms.
            [sys.executable, "-I", "-S", __file__, str(session), mark],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )

    def dismiss(self) -> None:
        """End it; nothing is left to guard."""
        self._process.kill()
        self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()


def _descendants(session: int, mark: str) -> list[int]:
    marked = f"{MARK}={mark}".encode()
    pids = [int(entry.name) for entry in os.scandir(PROC) if entry.name.isdigit()]
    # A number that a session still has is not given to a new process.
    reused = session in pids and not _has_mark(session, marked) and not _is_zombie(session)
    return [
        pid
        for pid in pids
        if pid != os.getpid()
        and not _is_zombie(pid)
        and (_has_mark(pid, marked) or (not reused and _session(pid) == session))
    ]


def _has_mark(pid: int, marked: bytes) -> bool:
    try:
        return marked in (PROC / str(pid) / "environ").read_bytes().split(b"\0")
    except OSError:  # gone, or another user's
        return False


def _session(pid: int) -> int | None:
    fields = _stat(pid)
    return int(fields[3]) if fields else None


def _is_zombie(pid: int) -> bool:
    fields = _stat(pid)
    return not fields or fields[0] == "Z"


def _stat(pid: int) -> list[str]:
    """Return what proc(5) says from the state on: parent, group, session; [] if it is gone."""
    try:
        text = (PROC / str(pid) / "stat").read_text()
    except OSError:
        return []
    return text.rpartition(")")[2].split()


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return


def _kill_group(group: int) -> None:
    try:
        os.killpg(group, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return


if __name__ == "__main__":
    sys.stdin.buffer.read()  # until the worker's end of the pipe is closed
    end_descendants(int(sys.argv[1]), sys.argv[2])
