"""What commands that work on a box's own Redis share: how it is found, and what is said if not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import redis
import typer

from gradbox.errors import ServiceUnavailable
from gradbox_service.database.refusals import store_refuses, why_refused
from gradbox_service.settings import Settings
from gradbox_service.up.embedded_redis import url_in

RedisUrl = Annotated[
    str | None, typer.Option(metavar="URL", help="address of Redis (GRADBOX_REDIS_URL)")
]
DataFolder = Annotated[
    Path | None,
    typer.Option(metavar="DIR", help="data folder of a running `gradbox up` (GRADBOX_DATA)"),
]


def at_redis(redis_url: str | None, data: Path | None) -> str:
    """Return --redis-url, else the Redis of the `gradbox up` that runs on this data folder."""
    settings = Settings.read(redis_url=redis_url, data=data)
    if redis_url is None and data is not None:
        return url_in(settings.data / "redis")
    return settings.redis_url or url_in(settings.data / "redis")


@contextmanager
def beside_the_box() -> Iterator[None]:
    """Let what Redis refuses for now end a command as what cannot be reached.

    Raises:
        ServiceUnavailable: Redis refuses, and why.
    """
    try:
        yield
    except redis.RedisError as error:
        if not store_refuses(error):
            raise
        why = f"Redis {why_refused(error)}"
        if isinstance(error, redis.ConnectionError):
            here = "is --data the folder of a running `gradbox up`?"
            why = f"Redis cannot be reached: {error}; {here}"
        raise ServiceUnavailable(why) from None
