"""Records that belong to owners, runs, saved states and stores, and what their files take.

    gradbox:KIND:ID            record, JSON
    gradbox:KINDs              zset of all ids by creation
    gradbox:KINDs:OWNER        the same of one owner's
    gradbox:KIND-bytes         hash: owner → bytes of their files

A change is written where the record is still the one that was read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Generic, Self, TypeVar, cast

import redis
from pydantic import TypeAdapter
from redis.client import Pipeline

from gradbox_service.database.conditional_commands import (
    Beside,
    ConditionalCommands,
    Outdated,
    until_current,
)

VERSION: Final = 1


@dataclass(frozen=True, kw_only=True)
class OwnedRecord:
    """What is known of something that belongs to an owner. Times are seconds since 1970, UTC."""

    id: str
    # The name of the token that made it.
    owner: str
    created_s: float
    # A record of a later one is not read.
    version: int = VERSION

    def __post_init__(self) -> None:
        """Raises:
        ValueError: a later version of gradbox wrote the record.
        """
        if self.version > VERSION:
            raise ValueError(
                f"expected a record of version {VERSION} or earlier, got {self.version}: a later "
                f"gradbox wrote it"
            )

    @property
    def kept_bytes(self) -> int:
        """What its files take."""
        return 0

    def to_json(self) -> bytes:
        return _adapter(type(self)).dump_json(self)

    @classmethod
    def from_json(cls, text: bytes) -> Self:
        """Raises:
        ValueError: these are not the bytes of a record that this version reads.
        """
        return cast(Self, _adapter(cls).validate_json(text))


def _adapter(kind: type) -> TypeAdapter[Any]:
    if kind not in _ADAPTERS:
        _ADAPTERS[kind] = TypeAdapter(kind)
    return _ADAPTERS[kind]


_ADAPTERS: Final[dict[type, TypeAdapter[Any]]] = {}


Record = TypeVar("Record", bound=OwnedRecord)


class OwnedBytes:
    """What the files of one kind take by owner: one hash of sums."""

    def __init__(self, connection: redis.Redis, key: str) -> None:
        self.key = key
        self._redis = connection

    def count(self, pipe: Pipeline, owner: str, num_bytes: int) -> None:
        """Count bytes by a transaction of the caller's; below zero for those that are gone."""
        if num_bytes:
            pipe.hincrby(self.key, owner, num_bytes)

    def totals(self) -> Counter[str]:
        """Return the bytes of every owner who has any."""
        found = cast("dict[bytes, bytes]", self._redis.hgetall(self.key))
        return Counter({owner.decode(): int(size) for owner, size in found.items() if int(size)})


class OwnedRecords(Generic[Record]):
    """The records of one kind. Every method is safe to call from several processes at once."""

    def __init__(
        self, connection: redis.Redis, kind: type[Record], name: str, *, counted_as: str = ""
    ) -> None:
        """Send nothing yet.

        Args:
            name: of the kind, in keys.
            counted_as: the kind among whose bytes these are; by default their own.
        """
        self._redis = connection
        self._kind, self._name = kind, name
        self._index = f"gradbox:{name}s"
        self._bytes = OwnedBytes(connection, f"gradbox:{counted_as or name}-bytes")
        self._creating = ConditionalCommands(connection)
        self._commands = ConditionalCommands(connection, over_bound=True)

    def get(self, record_id: str) -> Record | None:
        """Return a record, or None if there is none."""
        return self._read(record_id)[0]

    def many(self, ids: Sequence[str]) -> Sequence[Record]:
        """Return the records that there are of these."""
        texts = self._redis.mget([self._key(record_id) for record_id in ids]) if ids else []
        found = cast("list[bytes | None]", texts)
        return [self._kind.from_json(text) for text in found if text is not None]

    def owned(
        self, owner: str | None, *, after: tuple[float, str] | None = None
    ) -> Iterator[Record]:
        """Give an owner's records, newest first, or everybody's.

        Args:
            after: when one was created, and its id: those behind it alone.
        """
        index = self._index if owner is None else f"{self._index}:{owner}"
        until: Any = "+inf" if after is None else after[0]
        ids = cast("list[bytes]", self._redis.zrevrangebyscore(index, until, "-inf"))
        for record in self.many([record_id.decode() for record_id in ids]):
            if after is None or (record.created_s, record.id) < after:
                yield record

    def all(self) -> Sequence[Record]:
        """Return all records, newest first."""
        return list(self.owned(None))

    def named(self, key: str) -> tuple[Record | None, str]:
        """Return the record that was kept under a key of Redis, and what was noted there."""
        found = cast("bytes | None", self._redis.get(key))
        record_id, _, noted = (found or b"").decode().partition(" ")
        return (self.get(record_id) if found else None), noted

    def keep(
        self,
        record: Record,
        *,
        under: str | None = None,
        noted: str = "",
        lifetime_s: int | None = None,
    ) -> Record:
        """Keep a record, or return the one that was kept under the same key before.

        Args:
            under: the key, see `named`.
            noted: with the record's id.
            lifetime_s: of the key; None: as long as the record.
        """
        while True:
            pipe = self._redis.pipeline()
            beside = self._put(None, record, read=b"")
            where = {**beside.where}
            if under is not None:
                where[under] = cast("bytes | None", self._redis.get(under)) or b""
                earlier = self.named(under)[0]
                if earlier is not None:
                    return earlier
                pipe.set(under, f"{record.id} {noted}", ex=lifetime_s)
            beside.write(pipe)
            if self._creating.run(pipe, where=where):
                return record
            if found := self.get(record.id):  # the answer to this very script was lost
                return found

    def change(self, record_id: str, changed: Callable[[Record], Record]) -> Record | None:
        """Change a record, and return it; None if there is none (any more)."""

        def attempt() -> Record | None:
            before, text = self._read(record_id)
            if before is None:
                return None
            after = changed(before)
            if after != before:
                self.write(self._put(before, after, read=text))
            return after

        return until_current(attempt)

    def replacing(self, before: Record | None, after: Record) -> Beside:
        """Return the write of a record in place of another one; None: of one that is not there.

        Raises:
            Outdated: that has changed.
        """
        now, text = self._read(after.id)
        if now != before:
            raise Outdated
        return self._put(before, after, read=text)

    def write(self, beside: Beside) -> None:
        """Write something by itself.

        Raises:
            Outdated: what it follows from has changed.
        """
        pipe = self._redis.pipeline()
        beside.write(pipe)
        if not self._commands.run(pipe, where=beside.where):
            raise Outdated

    def forget(self, record: Record) -> None:
        """Remove all that is known of a record; its files are the caller's to remove.

        Raises:
            Outdated: it has changed.
        """
        now, text = self._read(record.id)
        if now != record:
            raise Outdated

        def write(pipe: Pipeline) -> None:
            pipe.delete(self._key(record.id), *self._keys_beside(record))
            for index in (self._index, f"{self._index}:{record.owner}"):
                pipe.zrem(index, record.id)
            self._bytes.count(pipe, record.owner, -record.kept_bytes)

        self.write(Beside(write, {self._key(record.id): text}))

    def totals(self) -> Counter[str]:
        """Return what the files of every owner take who has any."""
        return self._bytes.totals()

    def _put(
        self,
        before: Record | None,
        after: Record,
        *,
        read: bytes,
        more: Callable[[Pipeline], None] = lambda _: None,
    ) -> Beside:
        """Return the write of a record in place of the one that was read as these bytes."""
        num_bytes = after.kept_bytes - (0 if before is None else before.kept_bytes)

        def write(pipe: Pipeline) -> None:
            pipe.set(self._key(after.id), after.to_json())
            if before is None:
                for index in (self._index, f"{self._index}:{after.owner}"):
                    pipe.zadd(index, {after.id: after.created_s})
            self._bytes.count(pipe, after.owner, num_bytes)
            more(pipe)

        return Beside(write, {self._key(after.id): read})

    def _read(self, record_id: str) -> tuple[Record | None, bytes]:
        text = cast("bytes | None", self._redis.get(self._key(record_id)))
        return (None if text is None else self._kind.from_json(text)), text or b""

    def _key(self, record_id: str) -> str:
        return f"gradbox:{self._name}:{record_id}"

    def _keys_beside(self, record: Record) -> Sequence[str]:
        """Return the keys that go with a record."""
        return ()
