"""The processes of one box, found in /proc by what they inherited, and told apart by their parents.

gradbox up ─┬─ valkey
            ├─ service
            └─ worker ─┬─ device
                       └─ what it keeps beside the device: a guardian
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Role = Literal["up", "valkey", "service", "worker", "device", "beside", "other"]
# An entry of the environment that `gradbox up` and all that it starts inherit.
MARK = "GRADBOX_CHAOS"
# What processes call themselves.
NAMES: dict[str, Role] = {"gradbox-device": "device"}
BELOW_A_WORKER: tuple[Role, ...] = ("device", "beside")


@dataclass(frozen=True)
class Process:
    """One living process. `name` is the worker's for it and its children, else the role."""

    pid: int
    parent: int
    role: Role
    name: str
    frozen: bool
    command: str

    def signal(self, number: signal.Signals) -> bool:
        """Send a signal; False if the process is gone."""
        try:
            os.kill(self.pid, number)
        except ProcessLookupError:
            return False
        return True


def processes_of(mark: str, data: Path) -> list[Process]:
    """Return what lives of the box that was started with this mark, on this data folder."""
    found: dict[int, tuple[int, str, list[str]]] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            # A process may end between two reads of its files.
            with suppress(FileNotFoundError, ProcessLookupError, PermissionError):
                parent, state, command = _read(folder)
                # Valkey writes its title over its environment; the socket's path is in it.
                if state != "Z" and (_marked(folder, mark) or str(data) in " ".join(command)):
                    found[int(folder.name)] = (parent, state, command)
    roles = {pid: _role(command) for pid, (_, _, command) in found.items()}
    result = []
    for pid, (parent, state, command) in found.items():
        role, above = roles[pid], roles.get(parent)
        if role == "other" and above == "worker":
            role = NAMES.get(_called(pid), "beside")
        holder = found[parent][2] if role in BELOW_A_WORKER else command
        name = _worker_name(holder) if role in ("worker", *BELOW_A_WORKER) else role
        result.append(Process(pid, parent, role, name, state in "Tt", " ".join(command)))
    return result


def wait_until_gone(pids: Sequence[int], *, within_s: float) -> list[int]:
    """Wait for processes to end; return those that did not."""
    give_up = time.monotonic() + within_s
    left = list(pids)
    while left and time.monotonic() < give_up:
        left = [pid for pid in left if _alive(pid)]
        time.sleep(0.02)
    return left


def _alive(pid: int) -> bool:
    try:
        return _read(Path("/proc", str(pid)))[1] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def _read(folder: Path) -> tuple[int, str, list[str]]:
    state, parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
    command = (folder / "cmdline").read_bytes().decode(errors="replace")
    return int(parent), state, [part for part in command.split("\0") if part]


def _marked(folder: Path, mark: str) -> bool:
    return f"{MARK}={mark}".encode() in (folder / "environ").read_bytes().split(b"\0")


def _called(pid: int) -> str:
    try:
        return Path("/proc", str(pid), "comm").read_text().strip()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def _role(command: Sequence[str]) -> Role:
    line = " ".join(command)
    if "gradbox" in command and "up" in command:
        return "up"
    if "valkey-server" in line or "redis-server" in line or "unixsocket:" in line:
        return "valkey"
    if "gradbox_service" in command:
        return "service"
    if "gradbox_worker" in command:
        return "worker"
    return "other"


def _worker_name(command: Sequence[str]) -> str:
    return command[command.index("--name") + 1]
