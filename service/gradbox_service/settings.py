"""What a service process is told, by arguments or by the environment."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradbox.errors import GradboxError

GIB = 2**30
MIB = 2**20
DAY_S = 24 * 3600.0


class BadSettings(GradboxError, ValueError):
    """A setting is missing or cannot be used."""

    code = "bad-settings"
    title = "A setting cannot be used"


@dataclass(frozen=True)
class Settings:
    """The settings of one service process."""

    # Where Redis is; None only if the backing is given to `create_app` (an in-memory box).
    redis_url: str | None = None
    # The folder of blobs and results, shared with the workers.
    data: Path = Path("gradbox-data")
    host: str = "127.0.0.1"
    # 0 takes a free port.
    port: int = 8642
    # The largest blob, and the largest posted job, that are taken.
    max_blob_bytes: int = 64 * GIB
    max_spec_bytes: int = 32 * MIB
    # How often a job is begun before a lost worker ends it.
    max_attempts: int = 3
    # How long the service waits for open requests when it stops.
    drain_s: float = 10.0
    # What stays free on the disk; None is the larger of 1 GiB and 5 % of the disk.
    disk_reserve_bytes: int | None = None
    # What one owner's blobs and results may take together; None is no limit.
    owner_quota_bytes: int | None = None
    # What all blobs and results may take of the room that the box has: theirs and what is free.
    storage_share: float = 0.8
    # A result or a blob goes when nobody used it for so long, a record so long after its job ended.
    result_age_s: float = 7 * DAY_S
    blob_age_s: float = 30 * DAY_S
    record_age_s: float = 90 * DAY_S
    # How often all of this is looked at.
    clean_every_s: float = 60.0
    # How much memory the embedded Redis may take; new jobs are refused before it is reached.
    redis_memory_bytes: int = 2 * GIB

    @classmethod
    def read(cls, environment: Mapping[str, str] | None = None, **given: Any) -> Settings:
        """Read GRADBOX_REDIS_URL, GRADBOX_DATA, GRADBOX_HOST and GRADBOX_PORT; what is given wins.

        Raises:
            BadSettings: GRADBOX_PORT is no port.
        """
        environment = os.environ if environment is None else environment
        found: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        for name, variable in _VARIABLES.items():
            if name not in found and environment.get(variable):
                found[name] = environment[variable]
        if "data" in found:
            found["data"] = Path(found["data"]).expanduser()
        if "port" in found:
            found["port"] = _port(found["port"])
        return cls(**found)


_VARIABLES = {
    "redis_url": "GRADBOX_REDIS_URL",
    "data": "GRADBOX_DATA",
    "host": "GRADBOX_HOST",
    "port": "GRADBOX_PORT",
}


def _port(found: object) -> int:
    try:
        port = int(str(found))
    except ValueError:
        port = -1
    if not 0 <= port <= 65535:
        raise BadSettings(f"a port is a number from 0 to 65535, got {found!r}")
    return port
