"""The last step of a job, in a page of memory that a device process shares with its worker.

To note a step there takes a microsecond, so every one is noted. The worker reads it now and then to
publish the job's progress, and once more when the process has ended: it says where.
"""

from __future__ import annotations

import mmap
import os
import struct
import sys
import tempfile
from typing import Final, NamedTuple

NUM_BYTES: Final = 64
FORM: Final = struct.Struct("=40sqq")  # the phase, how many steps are done, and of how many


class JobStep(NamedTuple):
    """How far a job is."""

    phase: str
    done: int
    total: int


class LastStep:
    """The page, in the process that made it or in one that inherited its file.

    Attributes:
        fd: the file.
    """

    def __init__(self, fd: int | None = None) -> None:
        """Make a page, or share the one that `fd` is the file of."""
        self.fd = memory_file() if fd is None else fd
        if fd is None:
            os.ftruncate(self.fd, NUM_BYTES)
        self._page = mmap.mmap(self.fd, NUM_BYTES)

    def note(self, phase: str, done: int, total: int) -> None:
        """Note a step."""
        FORM.pack_into(self._page, 0, phase.encode(), done, total)

    def clear(self) -> None:
        """Note that no job has made a step."""
        FORM.pack_into(self._page, 0, b"", 0, 0)

    def read(self) -> JobStep | None:
        """Return what was noted last; None if no job has made a step."""
        before, found = b"", self._page[:]
        while found != before:  # it was being written
            before, found = found, self._page[:]
        phase, done, total = FORM.unpack_from(found)
        text = phase.rstrip(b"\0").decode(errors="replace")
        return JobStep(text, done, total) if text else None

    def close(self) -> None:
        """Forget the page."""
        self._page.close()
        os.close(self.fd)


def memory_file() -> int:
    """Return a file without a name, in memory where there is Linux: a full disk does not matter."""
    if sys.platform == "linux":
        return os.memfd_create("gradbox")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
