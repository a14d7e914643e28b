"""Results and blobs whose files somebody removed by hand: their owners are to have the room again.

To find them takes a look at every record. Where a folder is not there, its disk is not mounted, and
has lost nothing.
"""

from __future__ import annotations

import time
from functools import partial

from gradbox_service.backing import Backing
from gradbox_service.jobs import JobRecord


def note_removed(box: Backing) -> int:
    """Note what is gone; return how many results and blobs that are."""
    return _note_results(box) + _note_blobs(box)


def _note_results(box: Backing) -> int:
    if not box.results.room.folder.is_dir():
        return 0
    gone = [
        record.id
        for owner in box.records.result_bytes()
        for record in box.records.oldest(owner)
        if record.result_bytes and box.results.use_of(record.id, attempt=record.attempt) is None
    ]
    for job_id in gone:
        box.records.update(job_id, partial(JobRecord.drop_result, now_s=time.time()))
    return len(gone)


def _note_blobs(box: Backing) -> int:
    if not box.blobs.room.folder.is_dir():
        return 0
    known = list(box.owners.sizes())
    there = box.blobs.uses(known)
    gone = [name for name in known if name not in there]
    for name in gone:
        box.owners.forget(name)
    return len(gone)
