"""A small disk for a box's data, so that it can be filled."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def small_disk(folder: Path, size_bytes: int) -> Iterator[bool]:
    """Mount a disk in memory at a folder; gives False where this user may not."""
    folder.mkdir(mode=0o700)
    options = f"size={size_bytes},mode=700"
    mount = ["mount", "-t", "tmpfs", "-o", options, "gradbox-tests", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode != 0:
        yield False
        return
    try:
        yield True
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@contextmanager
def filled(folder: Path) -> Iterator[None]:
    """Take every byte that is left on a folder's disk."""
    ballast = folder / "ballast"
    try:
        for piece_bytes in (2**20, 2**10):
            with ballast.open("ab", buffering=0) as file, suppress(OSError):
                while True:
                    file.write(bytes(piece_bytes))
        yield
    finally:
        ballast.unlink(missing_ok=True)


def free_bytes(folder: Path) -> int:
    """Return what is free on a folder's disk."""
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize
