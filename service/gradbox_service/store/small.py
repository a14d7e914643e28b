"""Small files in Redis: no job waits for a disk, and none of its own is on one.

    gradbox:small:KIND:NAME     the bytes; it expires, years later, once they were sent whole to
                                whom they are for: so the read notes that
    gradbox:small:KIND          zset: name → when it was last used, in seconds since 1970

They are written by the transaction that makes them count, so they are there whole or not at all,
and go into Redis's own file with it. What is kept for longer than `KEPT_S` moves to the data folder
(`write_out` of the stores), for memory is dear.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Final, Literal, cast

import redis
from redis.client import Pipeline

from gradbox_service.database.conditional_commands import OVER_BOUND
from gradbox_service.store.files import FileUse

# A file of so many bytes, or of more, goes to the data folder at once.
SMALL_BYTES: Final = 64 * 2**10
# One that was not used for so long moves there, or for so long where Redis fills up.
KEPT_S: Final = 600.0
KEPT_IF_FULL_S: Final = 30.0
# It does once it takes more than the third part of what it may.
FULL_FACTOR: Final = 3
PAGE: Final = 500
# So long after it was sent a file would expire, were it not in the data folder by then.
EXPIRES_S: Final = 10 * 365 * 24 * 3600
# KEYS: the bytes, the set; ARGV: the name, and since when it was not used.
REMOVE: Final = (
    OVER_BOUND
    + """
local used = redis.call('ZSCORE', KEYS[2], ARGV[1])
if not used or tonumber(used) > tonumber(ARGV[2]) then return 0 end
redis.call('ZREM', KEYS[2], ARGV[1])
return redis.call('DEL', KEYS[1])
"""
)


class SmallFiles:
    """Those of one kind. Without a connection there are none, and none is taken."""

    def __init__(self, connection: redis.Redis | None, kind: Literal["blob", "result"]) -> None:
        self._redis = connection
        self._used = f"gradbox:small:{kind}"
        self._remove = None if connection is None else connection.register_script(REMOVE)

    def take(self, num_bytes: int) -> bool:
        """Return whether a file of this size belongs here."""
        return self._redis is not None and num_bytes < SMALL_BYTES

    def write(self, pipe: Pipeline, name: str, content: bytes | memoryview) -> None:
        """Write a file by a transaction of the caller's."""
        pipe.set(self._key(name), cast(Any, content))
        pipe.zadd(self._used, {name: time.time()})

    def read(self, name: str) -> bytes | None:
        """Return a file; None if it is not here."""
        if self._redis is None:
            return None
        return cast("bytes | None", self._redis.get(self._key(name)))

    def read_many(self, names: Sequence[str], *, used: bool) -> dict[str, bytes]:
        """Return those of some files that are here.

        Args:
            used: whether that is a use of them.
        """
        if self._redis is None or not names:
            return {}
        with self._redis.pipeline(transaction=False) as pipe:
            # A use is noted first: whoever removes files either sees it or has removed them.
            if used:
                pipe.zadd(self._used, dict.fromkeys(names, time.time()), xx=True)
            pipe.mget([self._key(name) for name in names])
            found = zip(names, pipe.execute(raise_on_error=False)[-1], strict=True)
        return {name: content for name, content in found if content is not None}

    def fetch_many(self, names: Sequence[str]) -> dict[str, bytes]:
        """Return those of some files that are here, and note that they are sent, see `FileUse`."""
        if self._redis is None or not names:
            return {}
        with self._redis.pipeline(transaction=False) as pipe:
            for name in names:
                pipe.getex(self._key(name), ex=EXPIRES_S)
            found = zip(names, pipe.execute(), strict=True)
        return {name: content for name, content in found if content is not None}

    def use(self, name: str) -> bytes | None:
        """Return a file, and note that it is used now; None if it is not here."""
        return self.read_many([name], used=True).get(name)

    def note_fetched(self, name: str) -> None:
        """Note that a file was sent whole to whom it is for."""
        if self._redis is not None:
            self._redis.expire(self._key(name), EXPIRES_S)

    def uses(self, names: Collection[str]) -> Mapping[str, FileUse]:
        """Return the size and last use of each file that is here; to ask is no use."""
        if self._redis is None or not names:
            return {}
        with self._redis.pipeline(transaction=False) as pipe:
            for name in names:
                pipe.strlen(self._key(name))
                pipe.zscore(self._used, name)
                pipe.expiretime(self._key(name))
            found = pipe.execute()
        of = zip(names, found[::3], found[1::3], found[2::3], strict=True)
        return {
            name: FileUse(size, max(used, expires_s - EXPIRES_S), used, read_only=expires_s > 0)
            for name, size, used, expires_s in of
            if size and used is not None
        }

    def all(self, *, unused_since_s: float | None = None) -> Iterator[tuple[str, FileUse]]:
        """Give every file, or those that were not used since a time."""
        if self._redis is None:
            return
        until: Any = "+inf" if unused_since_s is None else unused_since_s
        names = iter(cast("list[bytes]", self._redis.zrangebyscore(self._used, "-inf", until)))
        while page := [name.decode() for name in islice(names, PAGE)]:
            yield from self.uses(page).items()

    def remove(self, name: str, *, unused_since_s: float) -> bool:
        """Remove a file unless it was used after a time; return whether it went."""
        if self._remove is None:
            return False
        keys = [self._key(name), self._used]
        return bool(self._remove(keys=keys, args=[name, repr(unused_since_s)]))

    def write_out(self, write: Callable[[str, bytes, FileUse], None]) -> None:
        """Move the files that are due to the data folder.

        Args:
            write: writes one there.
        """
        if self._redis is None:
            return
        memory = cast("dict[str, int]", self._redis.info("memory"))
        is_full = 0 < memory.get("maxmemory", 0) < FULL_FACTOR * memory["used_memory"]
        kept_s = KEPT_IF_FULL_S if is_full else KEPT_S
        for name, found in self.all(unused_since_s=time.time() - kept_s):
            if (content := self.read(name)) is not None:
                write(name, content, found)
                self.remove(name, unused_since_s=time.time())

    def _key(self, name: str) -> str:
        return f"{self._used}:{name}"
