"""Where those stand who are told: their position, for whom they wait and about how long.

The first of the queue are always placed, so that the queue can be shown; further back only jobs
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
from gradbox_service.jobs import JobRecord, Place, Records
from gradbox_service.queue.active_jobs import ActiveJobs

PACE_S: Final = 1.0
MAX_SHARE: Final = 0.02
ALWAYS_PLACED: Final = 200
# Of the owners for whom a job waits, those with most jobs are named.
MAX_NAMED: Final = 5
# A guess of the time that is left is told again when it moved by this share and this many seconds.
MOVED_SHARE: Final = 0.2
MOVED_S: Final = 5.0


class Places:
    """Stores and tells places for one dispatcher."""

    def __init__(self, records: Records) -> None:
        self._records = records
        self._told: dict[str, Place] = {}
        self._stored: tuple[int, frozenset[str], int, str | None] | None = None
        self._next_at = 0.0

    def tell(
        self,
        jobs: ActiveJobs,
        *,
        next_up: Sequence[JobRecord],
        num_workers: int,
        hold: str | None = None,
    ) -> None:
        """Store the places and tell those who are followed, if it is time to.

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
            found = _places(
                jobs, order, followed=followed, num_workers=0 if hold else num_workers, hold=hold
            )
            places = dict(found)
            told = [j for j in followed if j in places and _is_news(places[j], self._told.get(j))]
            with unless_refused():  # jobs run on; who waits is told once Redis has room again
                self._records.place(places, told=told)
                self._told = {job: places[job] for job in followed if job in places}
                self._stored = state
        self._next_at = began + max(PACE_S, (time.monotonic() - began) / MAX_SHARE)


def _places(
    jobs: ActiveJobs,
    order: Iterator[JobRecord],
    *,
    followed: frozenset[str],
    num_workers: int,
    hold: str | None,
) -> Iterator[tuple[str, Place]]:
    now_s = time.time()
    ahead: Counter[str] = Counter(record.owner for record in jobs.running)
    seconds = jobs.remaining_s()
    left = set(followed)
    for position, record in enumerate(order, start=1):
        if position > ALWAYS_PLACED and not left:
            return
        if position <= ALWAYS_PLACED or record.id in left:
            left.discard(record.id)
            named = heapq.nlargest(MAX_NAMED, ahead.items(), key=lambda item: item[1])
            begins_s = round(now_s + seconds / num_workers, 1) if num_workers else None
            yield record.id, Place(position, dict(named), begins_s, hold)
        ahead[record.owner] += 1
        seconds += jobs.durations.expected_s(record)


def _is_news(place: Place, told: Place | None) -> bool:
    if told is None or replace(place, begins_s=None) != replace(told, begins_s=None):
        return True
    if place.begins_s is None or told.begins_s is None:
        return place.begins_s is not told.begins_s
    moved_s = abs(place.begins_s - told.begins_s)
    return moved_s > max(MOVED_S, MOVED_SHARE * (told.seconds_left or 0.0))
