"""The folders of what owners keep on a box, each named by the id of its record: runs and stores."""

from __future__ import annotations

import shutil
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable
from pathlib import Path
from typing import Generic

from gradbox_service.database.owned import Record
from gradbox_service.store.files import use_of


class OwnedFolders(ABC, Generic[Record]):
    """The folders of all records of one kind."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def remove(self, record_id: str) -> None:
        """Remove all files of a record."""
        shutil.rmtree(self._folder / record_id, ignore_errors=True)

    def sweep(self, records: Iterable[Record], *, unused_for_s: float) -> None:
        """Remove folders of records that are gone, and files that no record speaks of.

        Args:
            records: all that there are.
            unused_for_s: what was written to since stays.
        """
        before_s, known = time.time() - unused_for_s, {record.id: record for record in records}
        for folder in self._folder.glob("*"):
            record = known.get(folder.name)
            for path in [folder] if record is None else folder.iterdir():
                found = use_of(path)
                if found is None or found.written_s >= before_s:
                    continue
                if record is None:
                    self.remove(folder.name)
                elif self._is_left_behind(path, record):
                    path.unlink(missing_ok=True)

    @abstractmethod
    def _is_left_behind(self, path: Path, record: Record) -> bool:
        """Return whether a file in a record's folder is none of its own."""
