"""What commands that work on a box's own Redis share: how it is found, and what is said if not."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import redis
import typer

from gradbox.cli.exits import UNREACHABLE, WRONG_USAGE
from gradbox_service.database.refusals import store_refuses, why_refused
from gradbox_service.identity.revocations import NotRevoked
from gradbox_service.identity.tokens import BadTokenName
from gradbox_service.settings import BadSettings, Settings
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


def beside_the_box(command: str, run: Callable[[], int]) -> int:
    """Run a command that needs the box's own Redis; where it cannot be done, say why.

    Returns:
        What `run` returns, or the exit code of why it did not.
    """
    try:
        return run()
    except (BadSettings, BadTokenName) as error:
        said, code = str(error), WRONG_USAGE
    except NotRevoked as error:
        said, code = str(error), UNREACHABLE
    except redis.RedisError as error:
        if not store_refuses(error):
            raise
        said, code = f"Redis {why_refused(error)}", UNREACHABLE
        if isinstance(error, redis.ConnectionError):
            here = "is --data the folder of a running `gradbox up`?"
            said = f"Redis cannot be reached: {error}; {here}"
    print(f"gradbox {command}: {said}", file=sys.stderr)
    return code
