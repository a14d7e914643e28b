"""What a device process notes in Redis of itself, for the worker that started it.

    gradbox:device:NAME    hash of worker NAME: the mark of a process → JSON, which only it writes

It is written when something is new: a model is being built, the process is ready, a job has changed
what is in memory. None of that belongs to a job.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, cast

import redis
from pydantic import BaseModel, ConfigDict

from gradbox.protocol import DeviceMemory, ModelBuild
from gradbox_service.database.conditional_commands import ConditionalCommands


class DeviceEntry(BaseModel):
    """The state of one device process.

    `tried` is one that has tried all models beside another process, and waits for that one's end.
    `models` maps names to versions, `unusable` names to reasons. `problem` says why it cannot be
    used at all: then it ends.
    """

    model_config = ConfigDict(frozen=True)

    state: Literal["starting", "tried", "ready"] = "starting"
    placement: str = ""
    hardware: str = ""
    models: Mapping[str, str] = {}
    unusable: Mapping[str, str] = {}
    building: ModelBuild | None = None
    memory: DeviceMemory | None = None
    problem: str = ""


class DeviceEntries:
    """The entries of the device processes of one worker."""

    def __init__(self, connection: redis.Redis, worker: str) -> None:
        self._redis, self._key = connection, f"gradbox:device:{worker}"
        self._commands = ConditionalCommands(connection, over_bound=True)

    def write(self, mark: str, entry: DeviceEntry) -> None:
        """Note the state of a process."""
        pipe = self._redis.pipeline()
        pipe.hset(self._key, mark, entry.model_dump_json())
        self._commands.run(pipe, where={})

    def read(self, mark: str) -> DeviceEntry | None:
        """Return what a process has noted; None if that is nothing yet."""
        text = cast("bytes | None", self._redis.hget(self._key, mark))
        return None if text is None else DeviceEntry.model_validate_json(text)

    def forget(self, mark: str) -> None:
        """Remove the entry of a process that has ended."""
        self._redis.hdel(self._key, mark)

    def forget_all(self) -> None:
        """Remove all entries: no process of the worker lives."""
        self._redis.delete(self._key)
