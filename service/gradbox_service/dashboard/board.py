"""Reads the picture of the box: when something changed, and only while somebody looks.

All who look share one picture, and so one set of reads: the first who wants a newer one reads it.
What changed is learnt from the one reader of the box's changes (`http.event_hub`), which calls
`Board.note`. Only records that changed are read again, and everything every few seconds, for what
no event says: a worker that fell silent, an event that was lost while Redis was away.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import suppress
from importlib import metadata
from typing import Final

import anyio.to_thread
import redis

from gradbox.protocol import BoxView, CallerView, JobState, ModelView
from gradbox_service.accounting.usage import MINUTE_S, BusyByWorker
from gradbox_service.backing import Backing
from gradbox_service.dashboard.picture import (
    MINUTES_SHOWN,
    devices_shown,
    jobs_shown,
    models_shown,
)
from gradbox_service.fleet import WorkerPresence
from gradbox_service.fleet.workers import offered_versions
from gradbox_service.jobs import Change, JobRecord
from gradbox_service.jobs.charges import busy_with_running

# Between two pictures, and between two that read everything.
PACE_S: Final = 0.5
REREAD_S: Final = 5.0
# With more changed records than this, everything is read.
MANY: Final = 50
VERSION: Final = metadata.version("gradbox")
# Who looks is filled in for each, see `seen_by`.
NOBODY: Final = CallerView(name="", admin=False)


class Source:
    """The box as it was last read. Only one thread at a time may read."""

    def __init__(self, box: Backing) -> None:
        self._box = box
        self._active: dict[str, JobRecord] = {}
        self._views: dict[tuple[str, str], ModelView] = {}
        self._started: frozenset[tuple[str, float]] = frozenset()

    def read(self, changed: Collection[str], everything: bool) -> BoxView:
        """Read what changed, and return the picture.

        Args:
            changed: ids of jobs whose records are to be read again.
            everything: read all records instead.
        """
        now_s = time.time()
        if everything:
            self._active = {record.id: record for record in self._box.records.active()}
        for job_id in changed:
            self._read_again(job_id)
        running = [r for r in self._active.values() if r.state is JobState.RUNNING]
        workers = self._box.fleet.workers()
        return BoxView(
            now_s=now_s,
            gradbox=VERSION,
            you=NOBODY,
            operation=self._box.operation.read(),
            num_running=len(running),
            num_queued=len(self._active) - len(running),
            jobs=jobs_shown(self._active.values(), self._box.records.positions()),
            devices=devices_shown(workers, self._busy_ms(running, now_s), now_s=now_s),
            models=models_shown(workers, self._model_views(workers)),
        )

    def _read_again(self, job_id: str) -> None:
        record = self._box.records.get(job_id)
        if record is None or record.state.final:
            self._active.pop(job_id, None)
        else:
            self._active[job_id] = record

    def _busy_ms(self, running: Sequence[JobRecord], now_s: float) -> BusyByWorker:
        last = int(now_s // MINUTE_S)
        charged = self._box.usage.busy_ms(last - MINUTES_SHOWN + 1, last)
        return busy_with_running(charged, running, now_s=now_s)

    def _model_views(self, workers: Sequence[WorkerPresence]) -> dict[tuple[str, str], ModelView]:
        """Return what models look like: descriptions are long, so each is read once.

        A worker that was started anew may describe the same version otherwise.
        """
        started = frozenset((worker.name, worker.started_s) for worker in workers)
        if started != self._started:
            self._views, self._started = {}, started
        for name, versions in offered_versions(workers).items():
            if (name, versions[0]) not in self._views:
                view = self._box.fleet.model(name, version=versions[0])
                if view is not None:
                    self._views[name, versions[0]] = view
        return self._views


log = logging.getLogger(__name__)


class Board:
    """The picture of one box. Its methods belong to one event loop."""

    def __init__(self, box: Backing) -> None:
        self._source = Source(box)
        self._picture: BoxView | None = None
        self._pictured_at = -math.inf
        self._all_read_at = -math.inf  # when everything was read
        self._noted: set[str] = set()
        self._changed = False
        self._reading = asyncio.Lock()
        self._viewers: set[asyncio.Event] = set()
        self._closed = False

    @property
    def watched(self) -> bool:
        """Whether anybody looks."""
        return bool(self._viewers)

    def note(self, changes: Collection[Change]) -> None:
        """Hear what changed. Cheap while nobody looks."""
        if self._viewers:
            self._noted.update(change.job_id for change in changes if change.job_id)
            self._changed = True
            self._wake()

    def close(self) -> None:
        """End all who look."""
        self._closed = True
        self._wake()

    async def now(self) -> BoxView:
        """Return a picture of this moment, for who looks once.

        Raises:
            redis.RedisError: the records cannot be read.
        """
        async with self._reading:
            if self._picture is None or self._changed or self._old:
                return await self._read()
            return self._picture

    async def pictures(self) -> AsyncIterator[BoxView]:
        """Yield a picture, and another whenever something changed; end on `close`."""
        woken = asyncio.Event()
        self._viewers.add(woken)
        try:
            seen: BoxView | None = await self.now()
            while seen is not None:
                yield seen
                seen = await self._after(seen, woken)
        finally:
            self._viewers.discard(woken)
            if not self._viewers:
                self._all_read_at = -math.inf  # from now on nothing is noted

    async def _after(self, seen: BoxView, woken: asyncio.Event) -> BoxView | None:
        """Wait for a picture after `seen`; None on `close`."""
        while not self._closed:
            if self._picture is not seen:
                return self._picture
            with suppress(TimeoutError):
                await asyncio.wait_for(woken.wait(), self._all_read_at + REREAD_S - _now())
            woken.clear()
            try:
                await self._renew(seen)
            except redis.RedisError as error:
                log.warning("the dashboard's picture is late (%s); trying again", error)
                await asyncio.sleep(1.0)
        return None

    async def _renew(self, seen: BoxView) -> None:
        """Read a picture if `seen` is the newest and something has changed since."""
        async with self._reading:
            if self._picture is seen and not self._closed and (self._changed or self._old):
                await asyncio.sleep(self._pictured_at + PACE_S - _now())
                await self._read()

    async def _read(self) -> BoxView:
        noted, self._noted, self._changed = self._noted, set(), False
        everything = self._old or len(noted) > MANY
        all_read_at, self._all_read_at = self._all_read_at, -math.inf  # if it fails
        picture = await anyio.to_thread.run_sync(
            self._source.read, frozenset() if everything else noted, everything
        )
        self._picture, self._pictured_at = picture, _now()
        if self._viewers:
            self._all_read_at = _now() if everything else all_read_at
        self._wake()
        return picture

    @property
    def _old(self) -> bool:
        return _now() - self._all_read_at >= REREAD_S

    def _wake(self) -> None:
        for woken in self._viewers:
            woken.set()


def _now() -> float:
    return time.monotonic()
