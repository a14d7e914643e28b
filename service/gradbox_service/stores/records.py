"""Stores in Redis.

    gradbox:store:ID           record, JSON
    gradbox:stores             set of all ids
    gradbox:store-name:OWNER:NAME  the id of an owner's store
    gradbox:store-bytes        hash: owner → bytes of the files

Rows are added in the write that ends the job which made them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final, cast

import redis
from redis.client import Pipeline

from gradbox.errors import StoreNotFound
from gradbox_service.database.conditional_commands import (
    Beside,
    ConditionalCommands,
    Outdated,
    until_current,
)
from gradbox_service.stores.files import StoreFiles
from gradbox_service.stores.record import StoreRecord

STORES: Final = "gradbox:stores"
BYTES: Final = "gradbox:store-bytes"


class Stores:
    """The stores of a box. Every method is safe to call from several processes at once."""

    def __init__(self, connection: redis.Redis, data: Path) -> None:
        """Open the stores of the box whose data is in this folder."""
        self.files = StoreFiles(data / "stores")
        self._redis = connection
        self._creating = ConditionalCommands(connection)
        self._commands = ConditionalCommands(connection, over_bound=True)

    def create(self, store: StoreRecord) -> StoreRecord:
        """Keep a store, or return the one that its owner has under that name."""
        key = _name_key(store.owner, store.spec.name)
        while True:
            found = cast("bytes | None", self._redis.get(key))
            earlier = None if found is None else self.get(found.decode())
            if earlier is not None:
                return earlier
            pipe = self._redis.pipeline()
            pipe.set(key, store.id)
            pipe.set(store_key(store.id), store.to_json())
            pipe.sadd(STORES, store.id)
            if self._creating.run(pipe, where={key: found or "", store_key(store.id): ""}):
                return store

    def get(self, store_id: str) -> StoreRecord | None:
        """Return a store's record, or None if there is none."""
        return self._read(store_id)[0]

    def named(self, owner: str, name: str) -> StoreRecord | None:
        """Return an owner's store of a name."""
        found = cast("bytes | None", self._redis.get(_name_key(owner, name)))
        return None if found is None else self.get(found.decode())

    def all(self) -> Sequence[StoreRecord]:
        """Return all stores, newest first."""
        ids = cast("set[bytes]", self._redis.smembers(STORES))
        if not ids:
            return []
        texts = self._redis.mget([store_key(store_id.decode()) for store_id in ids])
        found = [
            StoreRecord.from_json(text)
            for text in cast("list[bytes | None]", texts)
            if text is not None
        ]
        return sorted(found, key=lambda store: store.created_s, reverse=True)

    def change(
        self, store_id: str, changed: Callable[[StoreRecord], StoreRecord]
    ) -> StoreRecord | None:
        """Change a store's record, and return it; None if there is none (any more)."""

        def attempt() -> StoreRecord | None:
            before, text = self._read(store_id)
            if before is None:
                return None
            after = changed(before)
            pipe = self._redis.pipeline()
            pipe.set(store_key(store_id), after.to_json())
            if after != before and not self._commands.run(pipe, where={store_key(store_id): text}):
                raise Outdated
            return after

        return until_current(attempt)

    def adding(self, store_id: str, added: Callable[[StoreRecord], StoreRecord]) -> Beside:
        """Return what is written with the end of a job that has appended rows.

        Args:
            added: returns the record with the rows, or raises where they cannot be added.

        Raises:
            StoreNotFound: the store was deleted.
        """
        before, text = self._read(store_id)
        if before is None:
            raise StoreNotFound(f"store {store_id} was deleted while rows of it were made")
        after = added(before)

        def write(pipe: Pipeline) -> None:
            pipe.set(store_key(store_id), after.to_json())
            pipe.hincrby(BYTES, after.owner, after.size_bytes - before.size_bytes)

        return Beside(write, {store_key(store_id): text})

    def forget(self, store: StoreRecord) -> None:
        """Remove all that is known of a store; its files are the caller's to remove.

        Raises:
            Outdated: it has changed.
        """
        now, text = self._read(store.id)
        if now != store:
            raise Outdated
        pipe = self._redis.pipeline()
        pipe.delete(store_key(store.id), _name_key(store.owner, store.spec.name))
        pipe.srem(STORES, store.id)
        pipe.hincrby(BYTES, store.owner, -store.size_bytes)
        if not self._commands.run(pipe, where={store_key(store.id): text}):
            raise Outdated

    def bytes_of(self, owner: str) -> int:
        """Return what an owner's stores take on disk."""
        return int(cast("bytes | None", self._redis.hget(BYTES, owner)) or 0)

    def totals(self) -> Mapping[str, int]:
        """Return `bytes_of` for every owner who has any."""
        found = cast("dict[bytes, bytes]", self._redis.hgetall(BYTES))
        return {owner.decode(): int(size) for owner, size in found.items() if int(size)}

    def _read(self, store_id: str) -> tuple[StoreRecord | None, bytes]:
        text = cast("bytes | None", self._redis.get(store_key(store_id)))
        return (None if text is None else StoreRecord.from_json(text)), text or b""


def store_key(store_id: str) -> str:
    return f"gradbox:store:{store_id}"


def _name_key(owner: str, name: str) -> str:
    return f"gradbox:store-name:{owner}:{name}"
