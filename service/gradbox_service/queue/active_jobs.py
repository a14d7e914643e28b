"""The queued and running jobs in memory, kept up to date by the stream of changes.

Records are the truth. A change tells the record that it left, or its record is read again.
Everything is read when this process begins to lead and after entries of the stream were trimmed
unread; what still slips through (a change that no entry tells) is found by comparing ids now and
then.

    waiting    posted, or its turn was withdrawn or lost; ranked by priority, share and age
    fed        it has a turn in RQ's short list, or one that a worker has just taken from there
    running    a worker has begun it and renews its lease; `waiting` again when that ends
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from typing import Final, NamedTuple, Protocol

from gradbox.protocol import JobState
from gradbox_service.accounting.usage import HOUR_S, Usage
from gradbox_service.jobs import Change, JobRecord, Records
from gradbox_service.jobs.changes import MAX_CHANGES
from gradbox_service.jobs.charges import charge_of
from gradbox_service.queue.shares import HALF_LIVES_READ, Durations, Shares
from gradbox_service.queue.waiting import Waiting

COMPARE_S: Final = 30.0
READ_AT_ONCE: Final = 500


class ReadChanges(Protocol):
    """Reads changes as `Records.changes` does."""

    def __call__(self, after: str | None, *, wait_s: float) -> tuple[str, Sequence[Change]]: ...


class FoundNew(NamedTuple):
    """Whether a read of the changes found something new."""

    jobs: bool  # about a job's state, or everything was read again
    box: bool  # about a worker, or about what the box's owner says


class ActiveJobs:
    """What waits, what was handed out and what runs, with each owner's share."""

    def __init__(
        self,
        records: Records,
        usage: Usage | None,
        *,
        half_life_s: float,
        clock: Callable[[], float],
        ended: Callable[[JobRecord], None] = lambda _: None,
        changes: ReadChanges | None = None,
    ) -> None:
        """Hold no job yet; `begin` comes first.

        Args:
            changes: where changes are read; the records' own stream if None.
            ended: called once with every job that ends while this process leads.
        """
        self.shares = Shares(half_life_s=half_life_s)
        self.durations = Durations()
        self.waiting = Waiting(self.shares.key)
        self.lag_s = 0.0  # between the last change and when it was read here
        self.version = 0  # counts what could move a job's place
        self._records = records
        self._changes = changes or records.changes
        self._usage = usage
        self._clock = clock
        self._ended = ended
        self._jobs: dict[str, JobRecord] = {}
        self._running: dict[str, JobRecord] = {}
        self._fed: dict[str, JobRecord] = {}
        self._num_of: dict[str, int] = {}  # active jobs by owner
        self._cursor: str | None = None
        self._compared_at = 0.0
        self._began_s = 0.0  # to lead
        self._noted_ends: dict[str, None] = {}  # the newest last

    def begin(self) -> None:
        """Read everything, in place of what is here: this process leads from now on."""
        self._began_s = self._clock()
        self._load()

    @property
    def running(self) -> Collection[JobRecord]:
        return self._running.values()

    @property
    def fed(self) -> Collection[JobRecord]:
        return self._fed.values()

    def queued(self, job_id: str) -> JobRecord | None:
        """Return a job's record if it is queued."""
        record = self._jobs.get(job_id)
        return record if record is not None and record.state is JobState.QUEUED else None

    def snapshot(self) -> tuple[list[JobRecord], list[JobRecord]]:
        """Return the queued and the running jobs; another thread may call it."""
        jobs = self._jobs.copy().values()  # one step of the interpreter, so a whole one
        queued = [record for record in jobs if record.state is JobState.QUEUED]
        return queued, [record for record in jobs if record.state is JobState.RUNNING]

    def sync(self, *, wait_s: float = 0.0) -> FoundNew:
        """Read what changed, waiting for it."""
        cursor, changes = self._changes(self._cursor, wait_s=wait_s)
        kinds = {change.kind for change in changes}
        if "missed" in kinds:
            known = self._jobs.keys() | {change.job_id for change in changes if change.final}
            self._load()
            self.read(known - self._jobs.keys())  # they have ended meanwhile
            return FoundNew(jobs=True, box=True)
        if cursor != self._cursor:
            self._cursor = cursor
            self._note_lag(cursor)
        newest = {change.job_id: change.record for change in changes if change.kind == "state"}
        unread = [job_id for job_id, record in newest.items() if record is None]
        num_new = sum(self._note(record) for record in newest.values() if record is not None)
        self.read(unread)
        if time.monotonic() - self._compared_at > COMPARE_S:
            self._compare()
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

    def note_fed(self, record: JobRecord) -> None:
        """Note that a job has a turn: it is ranked no more, and holds what it may take."""
        self.waiting.remove(record.id)
        self._fed[record.id] = record
        self._hold(record, self.durations.expected_s(record))

    def note_unfed(self, job_id: str) -> None:
        """Note that a job's turn is gone: it waits again."""
        record = self._fed.pop(job_id, None)
        if record is not None:
            self._free(record)
            self.waiting.add(record)

    def precedes(self, record: JobRecord, fed: JobRecord) -> bool:
        """Tell whether a job that waits goes before one that a turn was fed for."""
        use = self.shares.key(record.owner)
        use_of_fed = self.shares.key(fed.owner) - self.shares.held(fed.id)
        return (-record.priority, use, record.created_s) < (
            -fed.priority,
            use_of_fed,
            fed.created_s,
        )

    def ranked(self) -> Iterator[JobRecord]:
        """Yield the jobs that wait for a turn, in order; they must not change meanwhile."""
        weight = self.shares.weight(self._clock())
        return self.waiting.ranked(lambda record: self.durations.expected_s(record) * weight)

    def remaining_s(self) -> float:
        """Return how long the running jobs are expected to take from now on, in all."""
        now_s = self._clock()
        expected = [(self.durations.expected_s(r), r.started_s or now_s) for r in self.running]
        return sum(max(0.0, seconds - (now_s - started_s)) for seconds, started_s in expected)

    def keep_time(self) -> None:
        """Count for running jobs the seconds that they took beyond what was expected."""
        now_s = self._clock()
        for record in self._running.values():
            elapsed_s = now_s - (record.started_s or now_s)
            if elapsed_s > self.durations.expected_s(record):
                self._hold(record, elapsed_s)
        if self.shares.rebase(now_s):
            self.waiting.move_all()

    def _load(self) -> None:
        # The cursor first: a change while the rest is read is read again.
        self._cursor, _ = self._changes(None, wait_s=0.0)
        now_s = self._clock()
        hour = int(now_s // HOUR_S)
        first = hour - int(HALF_LIVES_READ * self.shares.half_life_s // HOUR_S) - 1
        self.shares.load(
            {} if self._usage is None else self._usage.by_hour(first, hour), now_s=now_s
        )
        self.waiting = Waiting(self.shares.key)
        for found in (self._jobs, self._running, self._fed, self._num_of):
            found.clear()
        for record in self._records.active():
            self._put(record.id, record)
        self._compared_at = time.monotonic()
        self.version += 1

    def _compare(self) -> None:
        self._compared_at = time.monotonic()
        active = set(self._records.active_ids())
        self.read(active ^ self._jobs.keys())

    def _note(self, record: JobRecord) -> bool:
        """Put a record that a change told; False where it, or a newer one, is known."""
        known = self._jobs.get(record.id)
        if record.id in self._noted_ends or (
            known is not None and (known.stage > record.stage or known == record)
        ):
            return False
        self._put(record.id, record)
        return True

    def _put(self, job_id: str, record: JobRecord | None) -> None:
        before = self._jobs.pop(job_id, None)
        was_fed = self._fed.pop(job_id, None) is not None
        if before is not None:
            self._leave(before)
            if record is not None:
                self._charge(before, record)
        if record is None or record.state.final:
            if record is not None:
                self._note_end(record)
            return
        if not self._num_of.get(record.owner):
            self.shares.arrive(record.owner, self._num_of, now_s=self._clock())
        self._num_of[record.owner] = self._num_of.get(record.owner, 0) + 1
        self._jobs[job_id] = record
        self.version += 1
        if record.state is JobState.RUNNING:
            self._running[job_id] = record
            self._hold(record, self.durations.expected_s(record))
        elif was_fed and before is not None and before.attempt == record.attempt:
            self.note_fed(record)
        else:
            self.waiting.add(record)

    def _leave(self, before: JobRecord) -> None:
        self.version += 1
        self._running.pop(before.id, None)
        self.waiting.remove(before.id)
        self._free(before)
        self._num_of[before.owner] -= 1
        if not self._num_of[before.owner]:
            del self._num_of[before.owner]

    def _charge(self, before: JobRecord, after: JobRecord) -> None:
        if after.attempt > before.attempt and after.state is not JobState.RUNNING:
            before = replace(after, state=JobState.RUNNING, finished_s=None)  # both at once
        charge = charge_of(before, after, now_s=self._clock())
        seconds = sum(used.device_ms for used in charge.by_hour.values()) / 1000 if charge else 0.0
        if seconds:
            self.shares.charge(after.owner, seconds, at_s=self._clock())
            self.durations.note(after, seconds)
            self.waiting.move(after.owner)

    def _note_end(self, record: JobRecord) -> None:
        """Call `ended` the first time that a job is seen to have ended since this process leads."""
        since_lead = (record.finished_s or 0.0) >= self._began_s
        if not since_lead or record.id in self._noted_ends:
            return
        self._noted_ends[record.id] = None
        if len(self._noted_ends) > MAX_CHANGES:  # older changes are not read any more
            del self._noted_ends[next(iter(self._noted_ends))]
        self._ended(record)

    def _hold(self, record: JobRecord, seconds: float) -> None:
        self.shares.hold(record.id, record.owner, seconds, now_s=self._clock())
        self.waiting.move(record.owner)

    def _free(self, record: JobRecord) -> None:
        self.shares.free(record.id)
        self.waiting.move(record.owner)

    def _note_lag(self, cursor: str) -> None:
        milliseconds = cursor.partition("-")[0]
        if len(milliseconds) > 10:  # an id of Redis begins with the time
            self.lag_s = max(0.0, time.time() - int(milliseconds) / 1000)
