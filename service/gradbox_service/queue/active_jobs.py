"""The queued and running jobs in memory, and how they count in whose turn it is.

    waiting    posted, or its turn was withdrawn or lost; ranked by priority, use and age
    fed        it has a turn in RQ's short list, or one that a worker has just taken from there
    running    a worker has begun it and renews its lease; `waiting` again when that ends

What holds after every call:

1. A job is in exactly one of the three; in `running` if its record says so, else in the others.
2. It holds the seconds that it is expected to take, in `shares`, if it is fed or runs.
3. Whoever changes an owner's key in `shares` moves the owner in `waiting`.
4. An owner is in `_num_of` with the number of their jobs, or has none.

Nothing here reads or writes: `following` keeps it up to date.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Set
from dataclasses import replace

from gradbox.protocol import JobState
from gradbox_service.accounting.usage import UsedByHour
from gradbox_service.jobs import JobRecord
from gradbox_service.jobs.charges import charge_of
from gradbox_service.queue.shares import Durations, Shares
from gradbox_service.queue.waiting import Waiting


class ActiveJobs:
    """What waits, what was handed out and what runs, with each owner's use."""

    def __init__(self, *, half_life_s: float, clock: Callable[[], float]) -> None:
        """Hold no job yet."""
        self.shares = Shares(half_life_s=half_life_s)
        self.durations = Durations()
        self.waiting = Waiting(self.shares.key)
        self.version = 0  # counts what could move a job in the queue
        self._clock = clock
        self._fed: dict[str, JobRecord] = {}
        self._running: dict[str, JobRecord] = {}
        self._num_of: dict[str, int] = {}  # jobs by owner

    @property
    def fed(self) -> Collection[JobRecord]:
        return self._fed.values()

    @property
    def running(self) -> Collection[JobRecord]:
        return self._running.values()

    @property
    def ids(self) -> Set[str]:
        return self.waiting.records.keys() | self._fed.keys() | self._running.keys()

    def num_of(self, owner: str) -> int:
        """Return how many jobs of an owner are here; another thread may call it."""
        return self._num_of.get(owner, 0)

    def get(self, job_id: str) -> JobRecord | None:
        """Return a job's record, if it is here."""
        return self._running.get(job_id) or self.queued(job_id)

    def queued(self, job_id: str) -> JobRecord | None:
        """Return a job's record if it is queued."""
        return self._fed.get(job_id) or self.waiting.records.get(job_id)

    def snapshot(self) -> tuple[list[JobRecord], list[JobRecord]]:
        """Return the queued and the running jobs; another thread may call it."""
        # To copy a dictionary is one step of the interpreter, so each is whole. A job may move on
        # between two of them, and counts where it was seen last.
        waiting, fed, running = (
            found.copy() for found in (self.waiting.records, self._fed, self._running)
        )
        queued = {**waiting, **fed}
        return [r for job_id, r in queued.items() if job_id not in running], [*running.values()]

    def begin(self, used: UsedByHour) -> None:
        """Hold no job any more, and begin anew with what owners were charged."""
        self.shares.load(used, now_s=self._clock())
        self.waiting.clear()
        for found in (self._fed, self._running, self._num_of):
            found.clear()
        self.version += 1

    def put(self, record: JobRecord) -> None:
        """Put a queued or running job where it belongs, in place of what was known of it."""
        fed = self._fed.get(record.id)
        self._take_out(record.id, after=record)
        if not self._num_of.get(record.owner):
            self.shares.arrive(record.owner, self._num_of, now_s=self._clock())
        self._num_of[record.owner] = self._num_of.get(record.owner, 0) + 1
        self.version += 1
        if record.state is JobState.RUNNING:
            self._running[record.id] = record
            self._hold(record, self.durations.expected_s(record))
        elif fed is not None and fed.attempt == record.attempt:
            self._feed(record)
        else:
            self.waiting.add(record)

    def remove(self, job_id: str, *, ended: JobRecord | None = None) -> None:
        """Remove a job, if it is here.

        Args:
            ended: its record at its end, by which its owner is charged.
        """
        self._take_out(job_id, after=ended)

    def note_fed(self, record: JobRecord) -> None:
        """Note that a job has a turn: it is ranked no more, and holds what it may take."""
        self.waiting.remove(record.id)
        self._feed(record)

    def note_unfed(self, job_id: str) -> None:
        """Note that a job's turn is gone: it waits again."""
        record = self._fed.pop(job_id, None)
        if record is not None:
            self._free(record)
            self.waiting.add(record)

    def precedes(self, record: JobRecord, fed: JobRecord) -> bool:
        """Return whether a job that waits goes before one that a turn was fed for."""
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

    def _take_out(self, job_id: str, *, after: JobRecord | None) -> None:
        """Take a job from where it is, and charge its owner what the change to `after` costs."""
        before = self.get(job_id)
        if before is None:
            return
        self.version += 1
        self._fed.pop(job_id, None)
        self._running.pop(job_id, None)
        self.waiting.remove(job_id)
        self._free(before)
        self._num_of[before.owner] -= 1
        if not self._num_of[before.owner]:
            del self._num_of[before.owner]
        if after is not None:
            self._charge(before, after)

    def _charge(self, before: JobRecord, after: JobRecord) -> None:
        if after.attempt > before.attempt and after.state is not JobState.RUNNING:
            before = replace(after, state=JobState.RUNNING, finished_s=None)  # both at once
        charge = charge_of(before, after, now_s=self._clock())
        seconds = sum(used.device_ms for used in charge.by_hour.values()) / 1000 if charge else 0.0
        if seconds:
            self.shares.charge(after.owner, seconds, at_s=self._clock())
            self.durations.note(after, seconds)
            self.waiting.move(after.owner)

    def _feed(self, record: JobRecord) -> None:
        self._fed[record.id] = record
        self._hold(record, self.durations.expected_s(record))

    def _hold(self, record: JobRecord, seconds: float) -> None:
        self.shares.hold(record.id, record.owner, seconds, now_s=self._clock())
        self.waiting.move(record.owner)

    def _free(self, record: JobRecord) -> None:
        self.shares.free(record.id)
        self.waiting.move(record.owner)
