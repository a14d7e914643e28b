"""How much memory this process has, and could still take, on a Linux host; 0 elsewhere."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import cache
from io import FileIO
from pathlib import Path
from typing import Final

MEMINFO: Final = "/proc/meminfo"
STATUS: Final = "/proc/self/status"
STATM: Final = "/proc/self/statm"
CGROUP_OF_SELF: Final = "/proc/self/cgroup"
CGROUPS: Final = "/sys/fs/cgroup"
KIB: Final = 1024

VERSION_2: Final = ("memory.max", "memory.current", "inactive_file")
VERSION_1: Final = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
"""Of a control group: the files of its limit and its use, and the statistic of cached files."""


def available_bytes() -> int:
    """Return how much memory this process could still take: cached files don't count as used.

    It is the machine's, or what the control groups around the process leave.
    """
    return min([_field(MEMINFO, "MemAvailable:") * KIB, *_left_in_cgroups()])


def private_bytes() -> int:
    """Return what RLIMIT_DATA counts of this process so far."""
    return status_bytes("VmData")


def resident_bytes() -> int:
    """Return how much of this process is in memory: VmRSS, without the rest of its status."""
    pages = _read(STATM).split()
    return int(pages[1]) * os.sysconf("SC_PAGE_SIZE") if pages else 0


def status_bytes(name: str) -> int:
    """Return a field of this process's status, as proc(5) names it: VmHWM, VmData."""
    return _field(STATUS, f"{name}:") * KIB


def _left_in_cgroups() -> Iterator[int]:
    for folder, (limit_file, used_file, cached) in _cgroups(CGROUP_OF_SELF, CGROUPS):
        limit = _read(f"{folder}/{limit_file}").strip()
        if not limit.isdigit():  # not a group, or one without a limit
            continue
        used = _read(f"{folder}/{used_file}").strip()
        if used.isdigit():
            yield max(0, int(limit) - int(used) + _field(f"{folder}/memory.stat", cached))


@cache
def _cgroups(of_self: str, mounted: str) -> list[tuple[str, tuple[str, str, str]]]:
    """Return the folders of the groups around this process that may have a limit, looked up once.

    Args:
        of_self: the file that names the group.
        mounted: the folder of all groups.
    """
    own = _read(of_self).decode().rpartition("0::")[2].strip()
    names = [name for name in own.split("/") if name]
    depths = range(len(names) + 1)
    groups = [(f"{mounted}/{'/'.join(names[:depth])}", VERSION_2) for depth in depths]
    return [
        (folder, files)
        for folder, files in (*groups, (f"{mounted}/memory", VERSION_1))
        if Path(folder, files[0]).exists()
    ]


def _field(path: str, name: str) -> int:
    """Return the number behind a name in a file of lines; 0 if it is not there."""
    _, found, behind = b"\n".join((b"", _read(path))).partition(f"\n{name}".encode())
    words = behind.partition(b"\n")[0].split()
    return int(words[0]) if found and words else 0


def _read(path: str) -> bytes:
    """Return what a small file of the kernel's holds; nothing if it cannot be read."""
    try:
        with FileIO(path) as file:  # a job reads eight: `Path` takes three times as long
            return file.read()
    except OSError:
        return b""
