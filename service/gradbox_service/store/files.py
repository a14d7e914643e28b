"""How files get their names, so that a name always means a whole file."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import hashlib
import os
import secrets
import stat
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

WRITE_OUT_BYTES: Final = 64 * 2**20
"""After so many bytes `begin_to_write_out` is worth its call."""

SYNC_FILE_RANGE_WRITE: Final = 2


def make_folder(path: Path) -> None:
    """Make a folder that only the box's own user reads, and its parents."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)


@dataclass(frozen=True)
class FileUse:
    """A file's size, when it was last used and written, in seconds since 1970, and its mode."""

    size_bytes: int
    used_s: float
    written_s: float
    read_only: bool = False


class FileState(NamedTuple):
    """What a file has another one of once it was written to, or replaced."""

    inode: int
    size_bytes: int
    written_ns: int

    @classmethod
    def of(cls, found: os.stat_result) -> FileState:
        """Return that of a file with this status."""
        return cls(found.st_ino, found.st_size, found.st_mtime_ns)


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file, which does not count as its use where the system can tell.

    Raises:
        OSError: it is not there, or cannot be read.
    """
    unused = getattr(os, "O_NOATIME", 0)
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | unused)) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def use_of(path: Path) -> FileUse | None:
    """Return a file's size and last use; None if there is no file."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    used_s = max(found.st_atime, found.st_mtime)
    return FileUse(found.st_size, used_s, found.st_mtime, not found.st_mode & stat.S_IWUSR)


def touch(path: Path) -> FileState | None:
    """Note that a file is used now, and return its state; None if there is no file.

    The time of its last write stays, by which the state tells whether another one followed. A disk
    that is read-only notes nothing, and can be read from all the same.
    """
    now_ns = time.time_ns()  # to the tick: the kernel's own would be some milliseconds old
    try:
        state = FileState.of(os.stat(path))
        os.utime(path, ns=(now_ns, state.written_ns))
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno != errno.EROFS:
            raise
    return state


def files_of(folder: Path, job_id: str) -> list[Path]:
    """Return the files in a folder that are called JOB.ANYTHING."""
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return []
    return [folder / name for name in names if name.startswith(f"{job_id}.")]


def lock(descriptor: int) -> bool:
    """Lock an open file until it is closed; False if another process has, or it cannot be done."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def lock_file(path: Path) -> int | None:
    """Lock a file, made where there is none, until the descriptor is closed or the process ends.

    None if another process has.

    Raises:
        OSError: it cannot be opened, or its file system knows no locks.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


def begin_to_write_out(descriptor: int) -> None:
    """Have the kernel begin to write an open file to disk, and do not wait.

    A flush afterwards finds little left to do. Where the kernel cannot be told it finds all of it.
    """
    if sys.platform == "linux":
        whole_file = (ctypes.c_int64(0), ctypes.c_int64(0))
        ctypes.CDLL(None).sync_file_range(descriptor, *whole_file, SYNC_FILE_RANGE_WRITE)


def put_in_place(temporary: Path, destination: Path) -> None:
    """Rename a flushed file to its name, and flush the name.

    Whoever has the earlier file of that name open or mapped keeps it.
    """
    make_folder(destination.parent)
    os.replace(temporary, destination)
    flush_folder(destination.parent)


def write_whole(path: Path, data: Any, *, flushed: bool = False) -> None:
    """Write a file that only the box's own user reads, so that it is there whole or not at all.

    Two processes may write the same one.

    Args:
        data: bytes, or a buffer.
        flushed: whether it is to survive a power failure.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        with open(temporary, "xb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
            file.write(data)
            if flushed:
                file.flush()
                os.fsync(file.fileno())
        os.replace(temporary, path)
        if flushed:
            flush_folder(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def flush_folder(path: Path) -> None:
    """Make the names in a folder survive a power failure."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
