"""Stores in Redis, as `database.owned` has records.

    gradbox:store-name:OWNER:NAME  the id of an owner's store

Rows are added in the write that ends the job which made them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import redis

from gradbox.errors import StoreNotFound
from gradbox_service.database.conditional_commands import Beside
from gradbox_service.database.owned import OwnedRecords
from gradbox_service.stores.files import StoreFiles
from gradbox_service.stores.record import StoreRecord


class Stores(OwnedRecords[StoreRecord]):
    """The stores of a box."""

    def __init__(self, connection: redis.Redis, data: Path) -> None:
        """Open the stores of the box whose data is in this folder."""
        super().__init__(connection, StoreRecord, "store")
        self.files = StoreFiles(data / "stores")

    def create(self, store: StoreRecord) -> StoreRecord:
        """Keep a store, or return the one that its owner has under that name."""
        return self.keep(store, under=_name_key(store))

    def adding(self, store_id: str, added: Callable[[StoreRecord], StoreRecord]) -> Beside:
        """Return what is written with the end of a job that has made a file of a store.

        Args:
            added: returns the record with the file, or raises where it cannot be added.

        Raises:
            StoreNotFound: the store was deleted.
        """
        before, text = self._read(store_id)
        if before is None:
            raise StoreNotFound(f"store {store_id} was deleted while a job wrote to it")
        return self._put(before, added(before), read=text)

    def _keys_beside(self, record: StoreRecord) -> Sequence[str]:
        return [_name_key(record)]


def _name_key(store: StoreRecord) -> str:
    return f"gradbox:store-name:{store.owner}:{store.spec.name}"
