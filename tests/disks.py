"""Disks of a few mebibytes, so that a test can fill one."""

from __future__ import annotations

import resource
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def small_disk(folder: Path, *, size_bytes: int, num_inodes: int = 0) -> Iterator[Path]:
    """Mount a file system of its own at `folder`; the test is skipped where that is not allowed.

    Args:
        num_inodes: how many it has in all, folders included; 0 is any number.
    """
    folder.mkdir(parents=True)
    options = f"size={size_bytes},mode=700,nr_inodes={num_inodes}"
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
    try:
        mounted = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("a small disk needs `mount`, which is not on PATH")
    if mounted.returncode != 0:
        pytest.skip(f"a small disk needs the right to mount one: {mounted.stderr.strip()}")
    try:
        yield folder
    finally:
        # Lazily: a process of a failed test may still have a file open.
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@contextmanager
def largest_file(size_bytes: int) -> Iterator[None]:
    """Let no file of this process grow beyond a size: what does meets EFBIG."""
    before, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (before, hard))
