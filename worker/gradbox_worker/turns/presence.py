"""A worker's name, held by one process at a time, and what the worker says of itself."""

from __future__ import annotations

import fcntl
import os
import socket
import time
from pathlib import Path
from typing import Any, Final, Literal

from gradbox.protocol import DeviceMemory, ModelBuild
from gradbox_service.database.refusals import unless_refused
from gradbox_service.fleet import Fleet, WorkerPresence
from gradbox_worker.device.entry import DeviceEntry
from gradbox_worker.errors import NameTaken

# `gradbox up` kills a worker that lets its entry lapse: see its watchdog.
PRESENCE_TTL_S: Final = 8.0
ANNOUNCE_S: Final = 2.0
# What only its memory is new about is said at most this often.
MEMORY_S: Final = 1.0


class NameLock:
    """The right to a worker's name on this data folder.

    The kernel gives the lock back when the process ends, however it ends. So who holds it knows
    that whatever is still noted under the name was left by a worker that is dead.
    """

    def __init__(self, data: Path, name: str) -> None:
        """Take the lock.

        Raises:
            NameTaken: a living worker has this name.
        """
        folder = data / "workers"
        folder.mkdir(parents=True, exist_ok=True)
        self._fd = os.open(folder / f"{name}.lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._fd)
            raise NameTaken(
                f"expected to be the only worker named {name!r} on {data}, but another one runs; "
                f"start this one with another --name"
            ) from None

    def __enter__(self) -> NameLock:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)


def default_name(device: str) -> str:
    """Return a name that a restarted worker gets again: the host's and the device's."""
    host = "".join(c if c.isalnum() or c in "-_." else "-" for c in socket.gethostname())
    return f"{host}-{device.replace(':', '-')}"


class Announcer:
    """Keeps the worker's entry in the fleet fresh.

    Attributes:
        has_offered: whether there was ever something that the device offers.
    """

    def __init__(self, fleet: Fleet, *, name: str) -> None:
        self.has_offered = False
        self._fleet = fleet
        self._presence = WorkerPresence(
            name=name,
            host=socket.gethostname(),
            device="",
            state="starting",
            started_s=time.time(),
        )
        self._announced: WorkerPresence | None = None
        self._announced_at = 0.0

    @property
    def reloads(self) -> int:
        """How many reloads were asked for when the models were last read."""
        return self._presence.reloads

    def offer(self, entry: DeviceEntry) -> None:
        """Announce from now on what a device process that is ready offers."""
        self.has_offered = True
        self._set(
            device=entry.placement,
            hardware=entry.hardware,
            models=entry.models,
            unusable=entry.unusable,
        )

    def note_reload(self, number: int, *, error: str = "") -> None:
        """Say from now on that the models file was read for this reload, or why it could not be."""
        self._set(reloads=number, reload_error=error)

    def announce(
        self,
        state: Literal["starting", "idle"],
        *,
        memory: DeviceMemory | None = None,
        building: ModelBuild | None = None,
    ) -> None:
        """Say what the worker does, if that is new or was last said a while ago.

        What Redis refuses for now is said with the next call.
        """
        self._set(state=state, memory=memory, building=building)
        now_s, presence, last = time.monotonic(), self._presence, self._announced
        if last is not None and presence.model_copy(update={"memory": last.memory}) == last:
            silent_s = ANNOUNCE_S if memory == last.memory else MEMORY_S
            if now_s - self._announced_at < silent_s:
                return
        with unless_refused("%s is %s, which nobody hears", presence.name, state):
            self._fleet.announce(presence, ttl_s=PRESENCE_TTL_S)
            self._announced, self._announced_at = presence, now_s

    def retire(self) -> None:
        """Say that the worker has stopped."""
        self._fleet.retire(self._presence.name)

    def _set(self, **changes: Any) -> None:
        self._presence = self._presence.model_copy(update=changes)
