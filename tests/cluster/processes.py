"""The processes of a box on a cluster, by what they run and whose descendants they are."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

DEADLINE_S = 60.0


def commands() -> dict[int, str]:
    """Return what every living process of this machine runs."""
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            text = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
        except OSError:  # gone
            continue
        if state != "Z":
            found[int(entry.name)] = text.strip()
    return found


def having(variable: str, value: str) -> list[int]:
    """Return the living processes that have a variable in the environment they began with."""
    wanted = f"{variable}={value}".encode()
    found = []
    for pid in commands():
        try:
            entries = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if wanted in entries:
            found.append(pid)
    return found


def running(part: str, *, among: list[int]) -> list[int]:
    """Return those of the processes whose command has this in it, oldest first."""
    now = commands()
    return sorted(pid for pid in among if part in now.get(pid, ""))


def parent(pid: int) -> int:
    """Return the process that started a process."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def kill(pid: int) -> None:
    """Kill a process at once."""
    os.kill(pid, signal.SIGKILL)


def wait_until(happened: Callable[[], object], *, what: str) -> None:
    """Wait for something, for a generous while."""
    deadline = time.monotonic() + DEADLINE_S
    while not happened():
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(0.05)
