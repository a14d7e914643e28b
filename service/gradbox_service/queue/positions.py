"""The positions of queued jobs: for whom they wait and about how long.

They are stored at most once a second, in at most a fiftieth of the time.
"""

from __future__ import annotations

import heapq
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain, islice
from typing import Final

from gradbox_service.database.refusals import unless_refused
from gradbox_service.jobs import JobRecord, QueuePosition, Records
from gradbox_service.queue.active_jobs import ActiveJobs

PACE_S: Final = 1.0
MAX_FRACTION: Final = 0.02
# Of the first so many.
NUM_KNOWN: Final = 10_000
# Of the owners for whom a job waits, those with most jobs are named.
MAX_NAMED: Final = 5
# A guess of the time that is left is news once it moved by this fraction of it, and by this many
# seconds.
MOVED_FRACTION: Final = 0.2
MOVED_S: Final = 5.0


class QueuePositions:
    """Stores positions for one dispatcher."""

    def __init__(self, records: Records) -> None:
        self._records = records
        self.stored = True  # whether some are, maybe of jobs that wait no more
        self._state: tuple[int, int, str | None] | None = None
        self._next_at = 0.0

    def store(
        self,
        jobs: ActiveJobs,
        *,
        next_up: Sequence[JobRecord],
        num_workers: int,
        hold: str | None = None,
    ) -> None:
        """Store the positions, if it is time to and they may have changed.

        Args:
            next_up: the jobs that turns were fed for, in their order.
            hold: why no job is handed to a worker, if none is; then nobody can say when one begins.
        """
        began, state = time.monotonic(), (jobs.version, num_workers, hold)
        if began < self._next_at:
            return
        if state != self._state:
            order = islice(chain(next_up, jobs.ranked()), NUM_KNOWN)
            positions = dict(
                _positions(jobs, order, num_workers=0 if hold else num_workers, hold=hold)
            )
            with unless_refused():  # jobs run on; who waits hears of it once Redis has room again
                self._records.set_positions(positions)
                self._state, self.stored = state, bool(positions)
        self._next_at = began + max(PACE_S, (time.monotonic() - began) / MAX_FRACTION)


def _positions(
    jobs: ActiveJobs, order: Iterator[JobRecord], *, num_workers: int, hold: str | None
) -> Iterator[tuple[str, QueuePosition]]:
    now_s = time.time()
    ahead: Counter[str] = Counter(record.owner for record in jobs.running)
    seconds = jobs.remaining_s()
    for position, record in enumerate(order, start=1):
        named = heapq.nlargest(MAX_NAMED, ahead.items(), key=lambda item: item[1])
        begins_s = round(now_s + seconds / num_workers, 1) if num_workers else None
        yield record.id, QueuePosition(position, dict(named), begins_s, hold)
        ahead[record.owner] += 1
        seconds += jobs.durations.expected_s(record)


def is_news(now: QueuePosition, published: QueuePosition | None) -> bool:
    """Return whether who was told one position of a job is to be told another."""
    if published is None or replace(now, begins_s=None) != replace(published, begins_s=None):
        return True
    if now.begins_s is None or published.begins_s is None:
        return now.begins_s is not published.begins_s
    moved_s = abs(now.begins_s - published.begins_s)
    return moved_s > max(MOVED_S, MOVED_FRACTION * (published.seconds_left or 0.0))
