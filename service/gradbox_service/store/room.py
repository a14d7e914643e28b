"""How much may still be written: what a disk has free, less a reserve.

The reserve is there for Redis, which refuses every change once it cannot append to its file, and
for logs. So a size is checked *before* anything is allocated: `posix_fallocate` takes all that is
free before it fails.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from gradbox.errors import StorageFull

GIB: Final = 2**30
SMALLEST_RESERVE_BYTES: Final = GIB
RESERVED_SHARE: Final = 0.05
# Room is taken in steps, so that two files that grow at once see each other.
STEP_BYTES: Final = GIB
# No space; no space within this user's or this process's limit.
DISK_IS_FULL: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@dataclass(frozen=True)
class Room:
    """The room on the disk of one folder, whether the folder exists yet or not.

    Attributes:
        reserve_bytes: what stays free; None is the larger of 1 GiB and 5 % of the disk.
    """

    folder: Path
    reserve_bytes: int | None = None

    def left_bytes(self) -> int:
        """Return how much may be written now, never below zero."""
        usage = self._usage()
        return max(0, usage.free - self._reserved_bytes(usage))

    def free_bytes(self) -> int:
        """Return what the disk has free, the reserve included."""
        return self._usage().free

    def reserved_bytes(self) -> int:
        """Return what is to stay free."""
        return self._reserved_bytes(self._usage())

    def check(self, num_bytes: int, *, what: str) -> None:
        """Check that `num_bytes` more may be written.

        Args:
            what: what is to be written, for the message: "this blob", "the result".

        Raises:
            StorageFull: they would reach into the reserve.
        """
        if num_bytes and num_bytes > self.left_bytes():
            raise self._full(f"{what} needs {in_units(num_bytes)}")

    def allocate(self, descriptor: int, size_bytes: int, *, what: str) -> None:
        """Give an open, empty file its size and, where the system can, its blocks.

        Raises:
            StorageFull: there is no room; what was allocated goes with the file.
        """
        self.check(size_bytes, what=what)
        with self.noticing_a_full_disk(what=what):
            if not hasattr(os, "posix_fallocate"):
                os.ftruncate(descriptor, size_bytes)
                return
            for start in range(0, size_bytes, STEP_BYTES):
                length = min(STEP_BYTES, size_bytes - start)
                self.check(length, what=what)
                os.posix_fallocate(descriptor, start, length)

    @contextmanager
    def noticing_a_full_disk(self, *, what: str) -> Iterator[None]:
        """Turn the system's word for a full disk into `StorageFull`."""
        try:
            yield
        except OSError as error:
            if error.errno not in DISK_IS_FULL:
                raise
            raise self._full(f"{what} met '{error.strerror}'") from error

    def _full(self, happened: str) -> StorageFull:
        usage = self._usage()
        reserved = in_units(self._reserved_bytes(usage))
        return StorageFull(
            f"{happened}, but of the {in_units(usage.free)} that the box's disk has free, "
            f"{reserved} are kept in reserve; send or ask for less (wrt, reduce, form='factored'), "
            f"or have the box's owner make room (`gradbox storage`)"
        )

    def _reserved_bytes(self, usage: shutil._ntuple_diskusage) -> int:
        if self.reserve_bytes is not None:
            return self.reserve_bytes
        return max(SMALLEST_RESERVE_BYTES, int(RESERVED_SHARE * usage.total))

    def _usage(self) -> shutil._ntuple_diskusage:
        folder = self.folder
        while True:
            try:
                return shutil.disk_usage(folder)
            except FileNotFoundError:
                if folder == folder.parent:
                    raise
            folder = folder.parent


def in_units(num_bytes: float) -> str:
    """Return a number of bytes as people read it: 512 B, 1.5 GiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} TiB"
