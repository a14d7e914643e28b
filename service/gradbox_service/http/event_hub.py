"""What becomes of jobs, for any number of listeners and of those who wait for an end.

The process's one reader of the stream of changes, the dispatcher, hands over all that it reads
(`Hub.hear`); who listens to a job gets its changes as events, and who waits for its end the record
that the last one carries. So many listeners take one Redis connection, not one each.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from functools import partial
from typing import NamedTuple

import anyio.to_thread
import redis

from gradbox.protocol import JobState
from gradbox_service.jobs import Change, Event, JobRecord, QueuePosition, Records
from gradbox_service.jobs.changes import parse_id, state_event
from gradbox_service.queue.positions import is_news
from gradbox_service.store import SMALL_BYTES, ResultStore

log = logging.getLogger(__name__)

# A listener reads on its own after this long: what no change said while Redis was away.
REREAD_S = 5.0
# One whose job waits looks where it does.
POSITION_S = 1.0
# Jobs whose end is remembered, for those who were about to wait for it.
MAX_ENDS = 1000


class Wants(Enum):
    """Who is to have a job's result."""

    OWNER = auto()
    SOMEBODY_ELSE = auto()


class End(NamedTuple):
    """A job's record after a wait for its end, and its small result where that was read."""

    record: JobRecord
    result: bytes | None = None


@dataclass(eq=False)
class Watcher:
    """One who listens to a job, or waits for its end alone.

    Attributes:
        ends_alone: whether it waits for the end alone.
        result: who wants a small result with the end, and then the result.
        changes: those not taken yet; None once they have to be read.
        queued: whether the job waited at the last look, and then where, as the listener was told.
    """

    ends_alone: bool = False
    result: Wants | bytes | None = None
    woken: asyncio.Event = field(default_factory=asyncio.Event)
    changes: list[Change] | None = field(default_factory=list)
    queued: bool = False
    position: QueuePosition | None = None

    def take(self) -> list[Change] | None:
        taken, self.changes = self.changes, []
        return taken

    async def wait(self, *, within_s: float) -> None:
        """Wait for a change, at most for this time."""
        timer = asyncio.get_running_loop().call_later(within_s, self.woken.set)
        try:
            await self.woken.wait()
        finally:
            timer.cancel()
        self.woken.clear()


class Hub:
    """Wakes those who listen; its methods belong to the event loop, but for `hear`."""

    def __init__(
        self,
        records: Records,
        results: ResultStore,
        *,
        on_changes: Callable[[Collection[Change]], None] = lambda _: None,
        anybody_else: Callable[[], bool] = lambda: False,
    ) -> None:
        """Know of no listener yet.

        Args:
            on_changes: called with all changes, in the event loop.
            anybody_else: whether to call it also where nobody listens to a job.
        """
        self._records, self._results = records, results
        self._on_changes = on_changes
        self._anybody_else = anybody_else
        self._listeners: dict[str, set[Watcher]] = {}  # by the id of their job
        # Of jobs that ended lately, the newest last: the record, where it is known.
        self._ends: OrderedDict[str, JobRecord | None] = OrderedDict()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closed = False

    def start(self) -> None:
        """Begin to wake listeners; call it in the event loop that they run in."""
        self._loop = asyncio.get_running_loop()

    def close(self) -> None:
        """End every listener. May be called twice."""
        self._closed = True
        self._wake(list(self._listeners))

    def hear(self, changes: Sequence[Change]) -> None:
        """Hear what changed, in the reader's thread."""
        # First the ends, then who waits for them: who comes in between finds the end.
        self._ends.update({change.job_id: change.record for change in changes if change.final})
        while len(self._ends) > MAX_ENDS:
            self._ends.popitem(last=False)
        self._read_results(changes)
        listened = self._anybody_else() or any(
            change.job_id in self._listeners or change.kind == "missed" for change in changes
        )
        if listened and self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._spread, changes)

    async def listen(self, job_id: str, *, after: str | None) -> AsyncIterator[Event]:
        """Yield the job's events behind `after`; end after the final one, or on `close`."""
        with self._registered(job_id, Watcher()) as watcher:
            watcher.changes = None
            while not self._closed:
                changes, ended = watcher.take(), False
                events: Sequence[Event | None] = [change.event for change in changes or ()]
                if not events or None in events:
                    read = partial(self._read, job_id, after, watcher, looks=changes == [])
                    ended, events = await anyio.to_thread.run_sync(read)
                for event in events:
                    if event is not None and (parse_id(event.id) > parse_id(after) or event.again):
                        yield event
                        after, ended = event.id, ended or event.final
                if ended:
                    return
                await watcher.wait(within_s=POSITION_S if watcher.queued else REREAD_S)

    async def ended(
        self,
        record: JobRecord,
        *,
        within_s: float,
        gone: asyncio.Future[None],
        wants: Wants | None = None,
    ) -> End:
        """Return the job's record at its end; as it is once `within_s` is over, or on `close`.

        The wait takes no thread.

        Args:
            gone: done once nobody waits any more, which ends the wait.
            wants: who is to have the small result with it.
        """
        clock = asyncio.get_running_loop().time
        until_s = clock() + within_s
        with self._registered(record.id, Watcher(ends_alone=True, result=wants)) as watcher:
            gone.add_done_callback(lambda _: watcher.woken.set())
            has_news = record.id in self._ends
            while not (self._closed or gone.done()):
                if has_news:
                    record = self._ends.get(record.id) or await self._read_again(record)
                    if record.state.final:
                        result = watcher.result
                        return End(record, result if isinstance(result, bytes) else None)
                left_s = until_s - clock()
                if left_s <= 0.0:
                    break
                await watcher.wait(within_s=min(left_s, REREAD_S))
                has_news = True  # or may have: nobody is woken while Redis is away
        return End(await self._read_again(record))

    async def _read_again(self, record: JobRecord) -> JobRecord:
        return await anyio.to_thread.run_sync(self._newest, record)

    def _newest(self, record: JobRecord) -> JobRecord:
        """Return the record as it is now; as it was if it cannot be read."""
        try:
            return self._records.get(record.id) or record
        except redis.RedisError as error:
            log.warning("job %s cannot be read (%s); trying again", record.id, error)
            return record

    def _read_results(self, changes: Sequence[Change]) -> None:
        """Read the small results of jobs that have ended, for those who wait for them."""
        awaited: dict[tuple[str, int], list[Watcher]] = {}
        for change in changes:
            watchers = list(self._listeners.get(change.job_id, ())) if change.final else []
            ended = change.record
            if ended is not None and 0 < ended.result_bytes < SMALL_BYTES:
                wanting = [watcher for watcher in watchers if watcher.result is not None]
                if wanting:
                    awaited[ended.id, ended.attempt] = wanting
        fetched = [
            job
            for job, watchers in awaited.items()
            if any(watcher.result is Wants.OWNER for watcher in watchers)
        ]
        try:
            found = self._results.small_of(list(awaited), fetched=fetched)
        except redis.RedisError as error:
            log.warning("small results cannot be read (%s); those who wait read them", error)
            return
        for (job_id, _), watchers in awaited.items():
            for watcher in watchers:
                watcher.result = found.get(job_id)

    def _read(
        self, job_id: str, after: str | None, watcher: Watcher, *, looks: bool
    ) -> tuple[bool, Sequence[Event | None]]:
        """Return whether nothing will follow, and the events behind `after`.

        Args:
            looks: whether there is no change to be read: the job may have ended all the same, or
                have another position in the queue.
        """
        try:
            # In this order: a job that has ended has written its last event.
            record = self._records.get(job_id)
            watcher.queued = record is not None and record.state is JobState.QUEUED
            ended = record is None or record.state.final
            if ended or not looks:
                return ended, self._records.events(job_id, after=after)
            position = self._records.positions([job_id]).get(job_id) if watcher.queued else None
            if record is None or position is None or not is_news(position, watcher.position):
                return False, ()
            watcher.position = position
            return False, [replace(state_event(after or "0-0", record, position), again=True)]
        except redis.RedisError as error:
            log.warning("events of job %s cannot be read (%s); trying again", job_id, error)
            return False, ()

    def _spread(self, changes: Collection[Change]) -> None:
        for change in changes:
            if change.kind == "missed":
                for watcher in (each for some in self._listeners.values() for each in some):
                    watcher.changes = None
                self._wake(list(self._listeners))
            for watcher in self._listeners.get(change.job_id, ()):
                if watcher.changes is not None and not watcher.ends_alone:
                    watcher.changes.append(change)
        self._wake({change.job_id for change in changes if not change.final}, ends_alone=False)
        self._wake({change.job_id for change in changes if change.final})
        self._on_changes(changes)

    def _wake(self, job_ids: Collection[str], *, ends_alone: bool = True) -> None:
        for job_id in job_ids:
            for watcher in self._listeners.get(job_id, ()):
                if ends_alone or not watcher.ends_alone:
                    watcher.woken.set()

    @contextmanager
    def _registered(self, job_id: str, watcher: Watcher) -> Iterator[Watcher]:
        self._listeners.setdefault(job_id, set()).add(watcher)
        try:
            yield watcher
        finally:
            self._listeners[job_id].discard(watcher)
            if not self._listeners[job_id]:
                del self._listeners[job_id]
