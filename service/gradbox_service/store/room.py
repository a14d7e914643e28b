"""Whether, and how much, may still be written: what a disk has free, less a reserve.

The reserve is there for Redis, which refuses every change once it cannot append to its file, and
for logs. So a size is checked *before* anything is allocated: `posix_fallocate` takes all that is
free before it fails.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from gradbox.errors import StorageFull

GIB: Final = 2**30
SMALLEST_RESERVE_BYTES: Final = GIB
RESERVED_FRACTION: Final = 0.05
# Room is taken in steps, so that two files that grow at once see each other.
STEP_BYTES: Final = GIB
# No space, or no inode; no space within this user's or this process's limit; read-only.
DISK_REFUSES: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)


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
        return self._left_bytes(self._disk())

    def free_bytes(self) -> int:
        """Return what the disk has free, the reserve included."""
        return _free_bytes(self._disk())

    def reserved_bytes(self) -> int:
        """Return what is to stay free."""
        return self._reserved_bytes(self._disk())

    def check(self, num_bytes: int, *, what: str) -> None:
        """Check that `num_bytes` more may be written.

        Args:
            what: what is to be written, for the message: "this blob", "the result".

        Raises:
            StorageFull: they would reach into the reserve, or the disk takes no file at all.
        """
        disk = self._disk()
        if (num_bytes and num_bytes > self._left_bytes(disk)) or _takes_nothing(disk):
            raise self._full(f"{what} needs {in_units(num_bytes)}", disk)

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
        """Turn the system's word for a full disk, or one that is read-only, into `StorageFull`."""
        try:
            yield
        except OSError as error:
            if error.errno not in DISK_REFUSES:
                raise
            raise self.refusal(error, what=what) from error

    def refusal(self, error: OSError, *, what: str) -> StorageFull:
        """Return what to say of an error whose number is among `DISK_REFUSES`."""
        return self._full(f"{what} met '{error.strerror}'", self._disk())

    def _full(self, happened: str, disk: os.statvfs_result) -> StorageFull:
        if nothing := _takes_nothing(disk):
            return StorageFull(f"{happened}, but {nothing}")
        reserved = in_units(self._reserved_bytes(disk))
        return StorageFull(
            f"{happened}, but of the {in_units(_free_bytes(disk))} that the box's disk has free, "
            f"{reserved} are kept in reserve; send or ask for less (wrt, reduce, form='factored'), "
            f"or have the box's owner make room (`gradbox storage`)"
        )

    def _left_bytes(self, disk: os.statvfs_result) -> int:
        return max(0, _free_bytes(disk) - self._reserved_bytes(disk))

    def _reserved_bytes(self, disk: os.statvfs_result) -> int:
        if self.reserve_bytes is not None:
            return self.reserve_bytes
        return max(SMALLEST_RESERVE_BYTES, int(RESERVED_FRACTION * disk.f_blocks * disk.f_frsize))

    def _disk(self) -> os.statvfs_result:
        folder = self.folder
        while True:
            try:
                return os.statvfs(folder)
            except FileNotFoundError:
                if folder == folder.parent:
                    raise
            folder = folder.parent


def _free_bytes(disk: os.statvfs_result) -> int:
    return disk.f_bavail * disk.f_frsize


def _takes_nothing(disk: os.statvfs_result) -> str:
    """Return why a disk takes no file, whatever bytes it has free, and what to do; "" if it does.

    A disk that counts no inodes says that it has none in all.
    """
    if disk.f_flag & os.ST_RDONLY:
        return (
            "the box's disk is read-only, as the system makes one after an error; ask the box's "
            "owner to look at the system's log and to mount it for writing again"
        )
    if disk.f_files and not disk.f_favail:
        return (
            "the box's disk has no inode left for another file, whatever bytes are free; ask the "
            "box's owner to remove files from it (`gradbox storage clean`)"
        )
    return ""


def in_units(num_bytes: float) -> str:
    """Return a number of bytes as people read it: 512 B, 1.5 GiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} TiB"
