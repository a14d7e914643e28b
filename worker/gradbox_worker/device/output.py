"""What a device process and its children print: read from a pipe, into a log of bounded size.

A model may print a gigabyte in a second. Were the log its standard output, somebody would have to
look at the log again and again and cut it, always too late. So only this module writes the log, and
counts: the file and the one before it never take more than `LONGEST_BYTES` each. A model that
prints faster than the disk takes waits at the pipe.

The pipe is read by a thread of the worker. When the device process dies, the thread reads on to the
end of the pipe, so the last lines before a crash are in the log. A worker that is frozen keeps a
printing model waiting until it goes on, or is killed and the device with it; of a worker that is
killed the pipe's content, at most 64 KiB, is lost.
"""

from __future__ import annotations

import logging
import os
import threading
from contextlib import suppress
from pathlib import Path
from typing import Final

log = logging.getLogger(__name__)

LONGEST_BYTES: Final = 8 * 2**20
PIECE_BYTES: Final = 2**16


class BoundedLog:
    """A log file, and the one before it. Goes on with a file that is there."""

    def __init__(self, path: Path) -> None:
        """Open nothing yet: what a full disk refuses now it may take later."""
        self._path = path
        self._lock = threading.Lock()
        self._fd: int | None = None
        self._size_bytes = 0
        self._refused = False

    def write(self, data: bytes) -> None:
        """Append at most `PIECE_BYTES`; what the disk does not take is lost."""
        with self._lock:
            try:
                while self._fd is None or self._size_bytes + len(data) > LONGEST_BYTES:
                    self._fd = self._next_file()
                self._size_bytes += os.write(self._fd, data)
                self._refused = False
            except OSError as error:
                if not self._refused:
                    log.warning("the device's output is not kept in %s: %s", self._path, error)
                self._refused = True

    def close(self) -> None:
        """Close the file; a later write opens it again."""
        with self._lock:
            if self._fd is not None:
                os.close(self._fd)
                self._fd = None

    def _next_file(self) -> int:
        """Open the log, having put aside the one that was open."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
            with suppress(FileNotFoundError):
                os.replace(self._path, self._path.with_name(f"{self._path.name}.1"))
        self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._size_bytes = os.fstat(found).st_size
        return found


class Output:
    """A pipe into a log. Give `write_fd` to the process as its output, then `begin`."""

    def __init__(self, into: BoundedLog) -> None:
        self._into = into
        self._read_fd, self.write_fd = os.pipe()
        self._thread = threading.Thread(target=self._read, name="device-output", daemon=True)

    def begin(self) -> None:
        """Read, now that the process has the other end."""
        os.close(self.write_fd)
        self._thread.start()

    def end(self, *, within_s: float) -> None:
        """Wait until all that was printed is in the log.

        A process that has escaped from its device may hold the pipe open for ever: after
        `within_s` the thread is left to it.
        """
        self._thread.join(within_s)

    def _read(self) -> None:
        while data := os.read(self._read_fd, PIECE_BYTES):
            self._into.write(data)
        os.close(self._read_fd)
