"""The files of stores, DATA/stores/ID/JOB.safetensors: the results of jobs that appended or fitted.

A file is there before its store's record speaks of it, by a hard link to the job's result.
"""

from __future__ import annotations

import os
from pathlib import Path

from gradbox_service.store.files import make_folder
from gradbox_service.store.folders import OwnedFolders
from gradbox_service.stores.record import StoreRecord


class StoreFiles(OwnedFolders[StoreRecord]):
    """The folders of all stores of a box."""

    def path(self, store_id: str, job: str) -> Path:
        """Return where the rows are that a job appended, or the curvature that it fitted."""
        return self._folder / store_id / f"{job}.safetensors"

    def paths(self, store: StoreRecord) -> list[Path]:
        """Return where a store's parts are, in their order."""
        return [self.path(store.id, part.job) for part in store.parts]

    def keep(self, store_id: str, job: str, result: Path) -> None:
        """Keep a job's result as a file of a store.

        Raises:
            OSError: the result is gone, or its file system has no hard links.
        """
        path = self.path(store_id, job)
        make_folder(path.parent)
        path.unlink(missing_ok=True)  # of an attempt whose end did not count
        os.link(result, path)

    def _is_left_behind(self, path: Path, record: StoreRecord) -> bool:
        return path.stem not in record.files
