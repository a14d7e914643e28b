"""The files of stores, DATA/stores/ID/JOB.safetensors: the result file of each job that appended.

A file is there before its store's record speaks of it, by a hard link to the job's result.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Mapping
from pathlib import Path

from gradbox_service.store.files import make_folder, use_of
from gradbox_service.stores.record import StoreRecord


class StoreFiles:
    """The folders of all stores of a box."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def path(self, store_id: str, job: str) -> Path:
        """Return where the rows are that a job appended."""
        return self._folder / store_id / f"{job}.safetensors"

    def paths(self, store: StoreRecord) -> list[Path]:
        """Return where a store's parts are, in their order."""
        return [self.path(store.id, part.job) for part in store.parts]

    def keep(self, store_id: str, job: str, result: Path) -> None:
        """Keep a job's result as a part of a store.

        Raises:
            OSError: the result is gone, or its file system has no hard links.
        """
        path = self.path(store_id, job)
        make_folder(path.parent)
        path.unlink(missing_ok=True)  # of an attempt whose end did not count
        os.link(result, path)

    def remove(self, store_id: str) -> None:
        """Remove all files of a store."""
        shutil.rmtree(self._folder / store_id, ignore_errors=True)

    def sweep(self, stores: Mapping[str, StoreRecord], *, unused_for_s: float) -> None:
        """Remove files of stores that are gone, and those that no record came to speak of.

        Args:
            stores: those that there are, by id.
            unused_for_s: what was written to since stays.
        """
        before_s = time.time() - unused_for_s
        for path in self._folder.glob("*/*"):
            store = stores.get(path.parent.name)
            known = set() if store is None else {part.job for part in store.parts}
            found = use_of(path)
            if path.stem not in known and found is not None and found.written_s < before_s:
                path.unlink(missing_ok=True)
        for folder in self._folder.glob("*"):
            if folder.name not in stores and not any(folder.iterdir()):
                folder.rmdir()
