"""The data folder of a box: its lock, the owner's token, and client.toml.

One `gradbox up` at a time may have it. The token stays in it for as long as the box knows it.
client.toml leads clients of this machine to the box, and is there while that is ready, so that it
names no box that is not; only a killed `gradbox up` leaves one behind.
"""

from __future__ import annotations

import getpass
import os
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Final

import redis

from gradbox.errors import GradboxError
from gradbox.settings import FILE, ClientSettings, write_settings
from gradbox_service.database.connection import connect
from gradbox_service.database.refusals import store_refuses, why_refused
from gradbox_service.identity.tokens import Tokens
from gradbox_service.store.files import lock_file, write_whole
from gradbox_service.up.embedded_redis import NoRedis

TOKEN_FILE: Final = "owner-token"


class DataInUse(GradboxError):
    """Another `gradbox up` keeps its data in this folder."""

    code = "data-in-use"
    title = "The data folder is in use"
    category = "user"


def lock_folder(data: Path) -> int:
    """Take the lock of a data folder, which the kernel gives back when this process ends.

    Raises:
        DataInUse: another process holds it; the message names the process.
    """
    path = data / "up.lock"
    descriptor = lock_file(path)
    if descriptor is None:
        holder = path.read_text(errors="replace").strip() or "unknown"
        raise DataInUse(
            f"another `gradbox up` (process {holder}) keeps its data in {data}: stop that one, or "
            f"give this one another folder with --data"
        )
    os.truncate(descriptor, 0)
    os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
    return descriptor


class Credentials:
    """The files in one data folder that hold the owner's token."""

    def __init__(self, data: Path) -> None:
        self._data = data

    def owner_token(self, redis_url: str) -> str:
        """Return the owner's token: that of an earlier run where the box still knows it.

        Raises:
            NoRedis: Redis takes no new token.
        """
        earlier = self._earlier_token()
        with closing(connect(redis_url)) as connection, takes_changes(self._data):
            tokens = Tokens(connection)
            known = None if earlier is None else tokens.find(earlier)
            if earlier is not None and known is not None and known.admin:
                token = earlier
            else:
                token = tokens.create(getpass.getuser().replace(" ", "-"), admin=True)
        write_whole(self._data / TOKEN_FILE, f"{token}\n".encode())
        return token

    def publish(self, url: str, token: str) -> None:
        """Lead clients of this machine to the box."""
        write_settings(self._data / FILE, ClientSettings(url=url, token=token))

    def withdraw(self) -> None:
        """Lead nobody here any more."""
        (self._data / FILE).unlink(missing_ok=True)

    def _earlier_token(self) -> str | None:
        try:
            return (self._data / TOKEN_FILE).read_text().strip()
        except FileNotFoundError:
            return None


@contextmanager
def takes_changes(data: Path) -> Iterator[None]:
    """Turn the server's refusal of a change into a word to who starts the box on `data`.

    Raises:
        NoRedis: it refuses one in here for now.
    """
    try:
        yield
    except redis.RedisError as error:
        if not store_refuses(error):
            raise
        raise NoRedis(
            f"the embedded Redis in {data} takes nothing for now: it {why_refused(error)}"
        ) from error
