"""Keeps the active jobs up to date by the stream of changes.

Records are the truth. A change carries the record that it left, or its record is read again.
Everything is read when this process begins to lead and after entries of the stream were trimmed
unread; what still slips through (a change without an entry) is found by comparing ids now and
then.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from typing import Final, NamedTuple

from gradbox_service.accounting.usage import HOUR_S, Usage
from gradbox_service.jobs import Change, JobRecord, Records
from gradbox_service.jobs.changes import MAX_CHANGES
from gradbox_service.queue.active_jobs import ActiveJobs
from gradbox_service.queue.shares import HALF_LIVES_READ

COMPARE_S: Final = 30.0
ADD_UP_S: Final = 1.0
READ_AT_ONCE: Final = 500


class FoundNew(NamedTuple):
    """Whether a read of the changes found something new."""

    jobs: bool  # about a job's state, or everything was read again
    box: bool  # about a worker, or about what the box's owner says


class Following:
    """Reads changes and records, and keeps `ActiveJobs` up to date."""

    def __init__(
        self,
        jobs: ActiveJobs,
        *,
        records: Records,
        usage: Usage,
        clock: Callable[[], float] = time.time,
        ended: Callable[[JobRecord], None] = lambda _: None,
    ) -> None:
        """Read nothing yet; `begin` comes first.

        Args:
            ended: called once with every job that ends while this process leads.
        """
        self.lag_s = 0.0  # between the last change and when it was read here
        self._jobs = jobs
        self._records = records
        self._usage = usage
        self._clock = clock
        self._ended = ended
        self._cursor = ""
        self._compared_at = 0.0
        self._added_up_at = 0.0
        self._began_s = 0.0  # to lead
        self._noted_ends: dict[str, None] = {}  # the newest last

    def begin(self) -> None:
        """Read everything, in place of what is known: this process leads from now on.

        Changes that were read before, and are noted after, say no more than that.
        """
        self._began_s = self._clock()
        self._load()

    def note(self, cursor: str, changes: Sequence[Change]) -> FoundNew:
        """Note what was read of the stream of changes, up to `cursor`."""
        kinds = {change.kind for change in changes}
        if "missed" in kinds:
            known = self._jobs.ids | {change.job_id for change in changes if change.final}
            self._load()
            self.read(known - self._jobs.ids)  # they have ended meanwhile
            return FoundNew(jobs=True, box=True)
        if cursor != self._cursor:
            self._cursor = cursor
            self._note_lag(cursor)
        newest = {change.job_id: change.record for change in changes if change.kind == "state"}
        unread = [job_id for job_id, record in newest.items() if record is None]
        num_new = sum(self._note(record) for record in newest.values() if record is not None)
        self.read(unread)
        if time.monotonic() - self._added_up_at > ADD_UP_S:
            self._added_up_at = time.monotonic()
            self._usage.add_up()
        if time.monotonic() - self._compared_at > COMPARE_S:
            self._compared_at = time.monotonic()
            self.read(set(self._records.active_ids()) ^ self._jobs.ids)
        wake = "wake" in kinds
        return FoundNew(jobs=num_new > 0 or bool(unread) or wake, box=wake or "worker" in kinds)

    def read(self, job_ids: Collection[str]) -> None:
        """Read records again."""
        ids = list(job_ids)
        for start in range(0, len(ids), READ_AT_ONCE):
            some = ids[start : start + READ_AT_ONCE]
            found = {record.id: record for record in self._records.many(some)}
            for job_id in some:
                self._put(job_id, found.get(job_id))

    def _load(self) -> None:
        hour = int(self._clock() // HOUR_S)
        first = hour - int(HALF_LIVES_READ * self._jobs.shares.half_life_s // HOUR_S) - 1
        self._jobs.begin(self._usage.by_hour(first, hour))
        for record in self._records.active():
            self._jobs.put(record)
        self._compared_at = time.monotonic()

    def _note(self, record: JobRecord) -> bool:
        """Put a record that a change carried; False where it, or a newer one, is known."""
        known = self._jobs.get(record.id)
        if record.id in self._noted_ends or (
            known is not None and (known.stage > record.stage or known == record)
        ):
            return False
        self._put(record.id, record)
        return True

    def _put(self, job_id: str, record: JobRecord | None) -> None:
        if record is not None and not record.state.final:
            self._jobs.put(record)
            return
        self._jobs.remove(job_id, ended=record)
        if record is not None:
            self._note_end(record)

    def _note_end(self, record: JobRecord) -> None:
        """Call `ended` the first time that a job is seen to have ended since this process leads."""
        since_lead = (record.finished_s or 0.0) >= self._began_s
        if not since_lead or record.id in self._noted_ends:
            return
        self._noted_ends[record.id] = None
        if len(self._noted_ends) > MAX_CHANGES:  # older changes are not read any more
            del self._noted_ends[next(iter(self._noted_ends))]
        self._ended(record)

    def _note_lag(self, cursor: str) -> None:
        milliseconds = cursor.partition("-")[0]
        if len(milliseconds) > 10:  # an id of Redis begins with the time
            self.lag_s = max(0.0, time.time() - int(milliseconds) / 1000)
