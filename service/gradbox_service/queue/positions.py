"""The positions of queued jobs that are published: for whom they wait and about how long.

The first of the queue always have one, so that the queue can be shown; further back only jobs
that somebody follows. It happens at most once a second, and takes at most a fiftieth of the time.
"""

from __future__ import annotations

import heapq
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain
from typing import Final

from gradbox_service.database.refusals import unless_refused
from gradbox_service.jobs import JobRecord, QueuePosition, Records
from gradbox_service.queue.active_jobs import ActiveJobs

PACE_S: Final = 1.0
MAX_FRACTION: Final = 0.02
ALWAYS_KNOWN: Final = 200
# Of the owners for whom a job waits, those with most jobs are named.
MAX_NAMED: Final = 5
# A guess of the time that is left is published again once it moved by this fraction of it, and by
# this many seconds.
MOVED_FRACTION: Final = 0.2
MOVED_S: Final = 5.0


class QueuePositions:
    """Stores and publishes positions for one dispatcher."""

    def __init__(self, records: Records) -> None:
        self._records = records
        self._published: dict[str, QueuePosition] = {}
        self._stored: tuple[int, frozenset[str], int, str | None] | None = None
        self._next_at = 0.0
        self._any = True  # of a process that led before

    @property
    def stored(self) -> bool:
        """Whether positions are stored, maybe of jobs that wait no more."""
        return self._any

    def publish(
        self,
        jobs: ActiveJobs,
        *,
        next_up: Sequence[JobRecord],
        num_workers: int,
        hold: str | None = None,
    ) -> None:
        """Store the positions and publish those that are followed, if it is time to.

        Args:
            next_up: the jobs that turns were fed for, in their order.
            hold: why no job is handed to a worker, if none is; then nobody can say when one begins.
        """
        began = time.monotonic()
        if began < self._next_at:
            return
        followed = frozenset(j for j in self._records.followed() if jobs.queued(j) is not None)
        state = (jobs.version, followed, num_workers, hold)
        if state != self._stored:
            order = chain(next_up, jobs.ranked())
            found = _positions(
                jobs, order, followed=followed, num_workers=0 if hold else num_workers, hold=hold
            )
            positions = dict(found)
            publish = [
                job
                for job in followed
                if job in positions and _is_news(positions[job], self._published.get(job))
            ]
            with unless_refused():  # jobs run on; who waits hears of it once Redis has room again
                self._records.set_positions(positions, publish=publish)
                self._published = {job: positions[job] for job in followed if job in positions}
                self._stored, self._any = state, bool(positions)
        self._next_at = began + max(PACE_S, (time.monotonic() - began) / MAX_FRACTION)


def _positions(
    jobs: ActiveJobs,
    order: Iterator[JobRecord],
    *,
    followed: frozenset[str],
    num_workers: int,
    hold: str | None,
) -> Iterator[tuple[str, QueuePosition]]:
    now_s = time.time()
    ahead: Counter[str] = Counter(record.owner for record in jobs.running)
    seconds = jobs.remaining_s()
    left = set(followed)
    for position, record in enumerate(order, start=1):
        if position > ALWAYS_KNOWN and not left:
            return
        if position <= ALWAYS_KNOWN or record.id in left:
            left.discard(record.id)
            named = heapq.nlargest(MAX_NAMED, ahead.items(), key=lambda item: item[1])
            begins_s = round(now_s + seconds / num_workers, 1) if num_workers else None
            yield record.id, QueuePosition(position, dict(named), begins_s, hold)
        ahead[record.owner] += 1
        seconds += jobs.durations.expected_s(record)


def _is_news(now: QueuePosition, published: QueuePosition | None) -> bool:
    if published is None or replace(now, begins_s=None) != replace(published, begins_s=None):
        return True
    if now.begins_s is None or published.begins_s is None:
        return now.begins_s is not published.begins_s
    moved_s = abs(now.begins_s - published.begins_s)
    return moved_s > max(MOVED_S, MOVED_FRACTION * (published.seconds_left or 0.0))
