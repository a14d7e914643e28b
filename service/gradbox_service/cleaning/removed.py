"""Results and blobs whose files somebody removed by hand: their owners are to have the room again.

To find them takes a look at every record, so it is taken only where more is counted than there is
on the disk, and where their folder is there: a disk that is not mounted has lost nothing.
"""

from __future__ import annotations

import logging
import time
from functools import partial

from gradbox_service.backing import Backing
from gradbox_service.jobs import JobRecord
from gradbox_service.store.files import use_of

log = logging.getLogger(__name__)


class RemovedByHand:
    """Notes that they are gone."""

    def __init__(self, box: Backing) -> None:
        self._box = box
        self._unexplained_bytes = 0  # by which more was counted after the last look

    def counted_bytes(self) -> int:
        """Return what is counted for all owners; ask before the files are listed."""
        results, blobs = self._box.records.result_bytes(), self._box.owners.totals()
        return sum(results.values()) + sum(blobs.values())

    def note(self, *, counted_bytes: int, there_bytes: int) -> None:
        """Note what is gone, where more is counted than is there."""
        if counted_bytes - there_bytes <= self._unexplained_bytes:
            return
        gone = self._note_results() + self._note_blobs()
        self._unexplained_bytes = max(0, self.counted_bytes() - there_bytes)
        if gone:
            log.warning("%d results and blobs are gone that the box did not remove", gone)

    def _note_results(self) -> int:
        if not self._box.results.room.folder.is_dir():
            return 0
        gone = [
            record.id
            for owner in self._box.records.result_bytes()
            for record in self._box.records.oldest(owner)
            if record.result_bytes
            and use_of(self._box.results.path(record.id, attempt=record.attempt)) is None
        ]
        for job_id in gone:
            self._box.records.update(job_id, partial(JobRecord.drop_result, now_s=time.time()))
        return len(gone)

    def _note_blobs(self) -> int:
        if not self._box.blobs.room.folder.is_dir():
            return 0
        blobs = self._box.blobs
        gone = [name for name in self._box.owners.known() if use_of(blobs.path(name)) is None]
        for name in gone:
            self._box.owners.forget(name)
        return len(gone)
