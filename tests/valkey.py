"""The Redis of a test process: one Valkey, which starts in 50 ms, with an empty database a box."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from functools import cache
from itertools import cycle
from pathlib import Path

from gradbox_service.backing import Backing
from gradbox_service.database.connection import connect
from gradbox_service.settings import Settings
from gradbox_service.up.embedded_redis import EmbeddedRedis

# Database 0 is the one that `connection` of tests/service empties. A server has 16.
_DATABASES = cycle(range(1, 16))


@cache
def server() -> EmbeddedRedis:
    """Return this process's server, which ends with it."""
    folder = Path(tempfile.mkdtemp(prefix="gradbox-tests-"))
    started = EmbeddedRedis.start(folder, appendfsync="no")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    atexit.register(started.stop)
    return started


def empty_backing(data: Path, settings: Settings | None = None) -> Backing:
    """Return the backing of a box with no record, whose files are under `data`.

    It is good until as many more were made as there are databases: what serves the tests of a whole
    session has a server of its own.
    """
    url = f"{server().url}?db={next(_DATABASES)}"
    connect(url).flushdb()
    settings = settings or Settings(data=data)
    return Backing.on_redis(settings.model_copy(update={"redis_url": url, "data": data}))
