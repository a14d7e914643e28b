"""Which jobs have a turn in RQ's list, or one that a worker has just taken from there.

The next turn is for the first of the jobs that wait, or for one whose model is loaded (`Choice`). A
turn says nothing but which job to begin. It waits in the list, is taken, and its job is begun
within milliseconds; one whose job is not is taken for lost, and the job waits for another.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final

from gradbox_service.jobs import JobRecord, Turn, Turns
from gradbox_service.queue.active_jobs import ActiveJobs

# A job whose model no worker has on its device lets others go before it: so many jobs, each among
# the next so many, of owners who are at most so many device seconds behind it in line.
MAX_PASSED_BY: Final = 4
LOOK_AHEAD: Final = 8
WARM_LEAD_S: Final = 10.0
# A turn that left the list so long ago, and whose job waits still, is lost.
TURN_GRACE_S: Final = 5.0
# One that was fed so long ago is looked after, and its job told where it waits.
LINGERING_S: Final = 0.25


class Choice:
    """Counts for each job how many went before it because their model was loaded."""

    def __init__(self, jobs: ActiveJobs, *, clock: Callable[[], float]) -> None:
        self._jobs = jobs
        self._clock = clock
        self._passed_by: dict[str, int] = {}

    def next(self, loaded: Collection[str]) -> JobRecord | None:
        """Return the job that is to have the next turn; None if none waits.

        Args:
            loaded: the models in the memory of the devices that may run it.
        """
        near = list(islice(self._jobs.ranked(), LOOK_AHEAD))
        if not near:
            self._passed_by.clear()
            return None
        first = near[0]
        passed_by = self._passed_by.pop(first.id, 0)
        if not loaded or first.model in loaded or passed_by >= MAX_PASSED_BY:
            return first
        shares = self._jobs.shares
        most = shares.key(first.owner) + WARM_LEAD_S * shares.weight(self._clock())
        for record in near[1:]:
            if record.priority != first.priority:
                break
            if record.model in loaded and shares.key(record.owner) <= most:
                self._passed_by[first.id] = passed_by + 1
                return record
        return first


@dataclass
class _Fed:
    """When a turn was fed, by the clock of records; the others are by the monotonic one."""

    fed_s: float
    first_at: float
    seen_at: float  # last in the list


class ShortList:
    """RQ's list, kept as long as there is room for by `feed`, and looked at by `look`."""

    def __init__(
        self, turns: Turns, jobs: ActiveJobs, *, grace_s: float, clock: Callable[[], float]
    ) -> None:
        """Know of no turn yet.

        Args:
            jobs: learn which of them have a turn.
        """
        self._turns = turns
        self._jobs = jobs
        self._grace_s = grace_s
        self._lingering_s = min(grace_s, LINGERING_S)
        self._clock = clock
        self._in_list: list[Turn] = []
        self._fed: dict[Turn, _Fed] = {}  # the same, and those that left the list a moment ago

    def __len__(self) -> int:
        return len(self._in_list)

    def lingers(self) -> bool:
        """Return whether a turn was fed some time ago: a short job's is taken at once."""
        now = time.monotonic()
        return any(now - fed.first_at > self._lingering_s for fed in self._fed.values())

    def forget(self) -> None:
        """Know of no turn any more: another process may have fed the list."""
        self._in_list, self._fed = [], {}

    def look(self) -> Sequence[str]:
        """Read the list, and note which jobs have a turn; return those that have lost theirs."""
        now = time.monotonic()
        # Fed twice, or for a job that has ended or runs, a turn does no harm and counts for none.
        self._in_list = [turn for turn in dict.fromkeys(self._turns.waiting()) if self._due(turn)]
        for turn in self._in_list:  # one that is not known was fed by an earlier leader
            self._fed.setdefault(turn, _Fed(math.inf, now, now)).seen_at = now
        self._fed = {
            turn: fed
            for turn, fed in self._fed.items()
            if now - fed.seen_at <= self._grace_s and self._due(turn)
        }
        have_turns = {turn.job_id for turn in self._fed}
        lost = [record.id for record in self._jobs.fed if record.id not in have_turns]
        for job_id in lost:
            self._jobs.note_unfed(job_id)
        for job_id in have_turns - {record.id for record in self._jobs.fed}:
            record = self._jobs.queued(job_id)
            if record is not None:
                self._jobs.note_fed(record)
        return lost

    def feed(self, record: JobRecord) -> None:
        """Append the turn of a job that waits."""
        self._turns.feed(_turn_of(record))
        self.note_fed(record)

    def note_fed(self, record: JobRecord) -> None:
        """Note that a job's turn was appended, or is about to be."""
        turn = _turn_of(record)
        self._in_list.append(turn)
        now = time.monotonic()
        self._fed[turn] = _Fed(self._clock(), now, now)
        self._jobs.note_fed(record)

    def empty(self) -> None:
        """Remove all turns; their jobs wait, as the next look notes."""
        self._turns.take_back()
        self.forget()

    def withdraw_outranked(self) -> None:
        """Remove the last turn if a job was posted since that goes before its job.

        A turn waits in the list while all workers are busy, so that the next job begins at once;
        who comes meanwhile and is to go first need not wait for that job as well.
        """
        first = next(self._jobs.ranked(), None)
        if first is None or not self._in_list:
            return
        last = self._in_list[-1]
        its_job = self._jobs.queued(last.job_id)
        if (
            its_job is not None
            and first.created_s > self._fed[last].fed_s
            and self._jobs.precedes(first, its_job)
            and self._turns.withdraw(last)
        ):
            self._in_list.pop()
            del self._fed[last]
            self._jobs.note_unfed(last.job_id)

    def next_up(self) -> Sequence[JobRecord]:
        """Return the jobs that have a turn, those first whose turn was taken."""
        return sorted(self._jobs.fed, key=lambda record: _turn_of(record) in self._in_list)

    def _due(self, turn: Turn) -> bool:
        """Return whether a turn's attempt is the one that its job waits for."""
        record = self._jobs.queued(turn.job_id)
        return record is not None and _turn_of(record) == turn


def _turn_of(record: JobRecord) -> Turn:
    return Turn(record.id, record.attempt + 1)
