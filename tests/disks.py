"""Disks of a few mebibytes, so that a test can fill one."""

from __future__ import annotations

import resource
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def small_disk(folder: Path, *, size_bytes: int) -> Iterator[Path]:
    """Mount a file system of its own at `folder`; the test is skipped where that is not allowed."""
    folder.mkdir(parents=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={size_bytes},mode=700", "tmpfs", str(folder)]
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
