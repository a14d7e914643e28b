"""How much memory this process has, and could still take, on a Linux host; 0 elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

MEMINFO: Final = Path("/proc/meminfo")
STATUS: Final = Path("/proc/self/status")
CGROUP_OF_SELF: Final = Path("/proc/self/cgroup")
CGROUPS: Final = Path("/sys/fs/cgroup")
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
    return _field(STATUS, "VmData:") * KIB


def _left_in_cgroups() -> Iterator[int]:
    try:
        own = CGROUP_OF_SELF.read_text().rpartition("0::")[2].strip().lstrip("/")
    except OSError:
        return
    groups = [(folder, VERSION_2) for folder in (CGROUPS / own, *(CGROUPS / own).parents)]
    for folder, (limit_file, used_file, cached) in (*groups, (CGROUPS / "memory", VERSION_1)):
        try:
            limit = (folder / limit_file).read_text().strip()
            used = int((folder / used_file).read_text())
        except OSError:  # not a group, or the root, which has no limit
            continue
        if limit != "max":
            yield max(0, int(limit) - used + _field(folder / "memory.stat", cached))


def _field(path: Path, name: str) -> int:
    """Return the number behind a name in a file of lines; 0 if it is not there."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.split()[:1] == [name]), 0)
