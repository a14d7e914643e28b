"""Events for any number of listeners with one blocking reader a process.

The reader waits on the records' stream of changes, which says that a job has something new, and
wakes that job's listeners; each then reads its job's own stream behind the last event it sent. So a
listener misses nothing and sends nothing twice, however often it is woken, and many listeners take
one Redis connection, not one each. Those who wait for a job's end alone get the record that its
change carries. The reader also passes on all changes to the dispatcher.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import anyio.to_thread
import redis

from gradbox.protocol import JobState
from gradbox_service.jobs import Change, Event, JobRecord, Records
from gradbox_service.repeating_thread import RepeatingThread

log = logging.getLogger(__name__)

# The reader looks up from its wait this often, to see whether it is to stop.
WAIT_S = 0.25
# A listener reads on its own after this long: what no change said while Redis was away.
REREAD_S = 5.0
# Jobs whose end is remembered, for those who were about to wait for it.
MAX_ENDS = 1000

# By the id of a job: an event for each of those who wait for something new about it.
Waiters = dict[str, set[asyncio.Event]]


class Hub(RepeatingThread):
    """Reads which jobs have new events, and wakes their listeners."""

    def __init__(
        self,
        records: Records,
        *,
        on_changes: Callable[[Collection[Change]], None] = lambda _: None,
        pass_on: Callable[[str, Sequence[Change]], None] = lambda _cursor, _changes: None,
    ) -> None:
        """Read nothing yet.

        Args:
            on_changes: called with all changes, in the event loop.
            pass_on: called with the same and the cursor behind them, in the reader's thread.
        """
        super().__init__("event reader", failed_pause_s=WAIT_S)
        self._records = records
        self._on_changes = on_changes
        self._pass_on = pass_on
        self._listeners: Waiters = {}
        self._waiting: Waiters = {}  # for the end alone
        # Of jobs that ended lately, the newest last: the record, where it is known.
        self._ends: OrderedDict[str, JobRecord | None] = OrderedDict()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._cursor: str | None = None

    def start(self) -> None:
        """Begin to read; call it in the event loop that the listeners run in."""
        self._loop = asyncio.get_running_loop()
        super().start()

    def close(self) -> None:
        """End every listener and the reader. May be called twice."""
        super().close()
        for waiters in (self._listeners, self._waiting):
            _wake(waiters, list(waiters))

    async def listen(self, job_id: str, *, after: str | None) -> AsyncIterator[Event]:
        """Yield the job's events behind `after`; end after the final one, or on `close`."""
        with _registered(self._listeners, job_id) as woken:
            while not self._stopping.is_set():
                woken.clear()
                ended, events = await anyio.to_thread.run_sync(self._news, job_id, after)
                for event in events:
                    yield event
                    after = event.id
                if ended or any(event.final for event in events):
                    return
                await _wait(woken, within_s=REREAD_S)

    async def ended(
        self, record: JobRecord, *, within_s: float, gone: asyncio.Future[None]
    ) -> JobRecord:
        """Return the job's record at its end; as it is once `within_s` is over, or on `close`.

        The wait takes no thread.

        Args:
            gone: done once nobody waits any more, which ends the wait.
        """
        clock = asyncio.get_running_loop().time
        until_s = clock() + within_s
        with _registered(self._waiting, record.id) as woken:
            gone.add_done_callback(lambda _: woken.set())
            has_news = record.id in self._ends
            while not (self._stopping.is_set() or gone.done()):
                if has_news:
                    record = self._ends.get(record.id) or await self._read_again(record)
                    if record.state.final:
                        return record
                left_s = until_s - clock()
                if left_s <= 0.0:
                    break
                await _wait(woken, within_s=min(left_s, REREAD_S))
                woken.clear()
                has_news = True  # or may have: nobody is woken while Redis is away
        return await self._read_again(record)

    async def _read_again(self, record: JobRecord) -> JobRecord:
        return await anyio.to_thread.run_sync(self._newest, record)

    def _newest(self, record: JobRecord) -> JobRecord:
        """Return the record as it is now; as it was if it cannot be read."""
        try:
            return self._records.get(record.id) or record
        except redis.RedisError as error:
            log.warning("job %s cannot be read (%s); trying again", record.id, error)
            return record

    def _news(self, job_id: str, after: str | None) -> tuple[bool, Collection[Event]]:
        """Return whether nothing will follow, and the events behind `after`."""
        try:
            # In this order: a job that has ended has written its last event.
            record = self._records.get(job_id)
            if record is not None and record.state is JobState.QUEUED:
                self._records.follow([job_id])
            return record is None or record.state.final, self._records.events(job_id, after=after)
        except redis.RedisError as error:
            log.warning("events of job %s cannot be read (%s); trying again", job_id, error)
            return False, ()

    def _step(self) -> None:
        cursor, self._cursor = self._cursor, None  # after a bad entry, read from now on
        try:
            self._cursor, changes = self._records.changes(cursor, wait_s=WAIT_S)
            if cursor is None:
                changes = [Change("", "missed")]  # whatever was before
            changes = self._with_awaited_ends(changes)
        except redis.RedisError as error:
            self._cursor = cursor
            log.warning("the events of the box cannot be read (%s); trying again", error)
            self._stopping.wait(WAIT_S)
            return
        if changes:
            self._pass_on(self._cursor, changes)
            if self._loop is not None and not self._loop.is_closed():
                self._loop.call_soon_threadsafe(self._spread, changes)

    def _with_awaited_ends(self, changes: Sequence[Change]) -> Sequence[Change]:
        """Read the records, where no change carried them, of ends that somebody waits for."""
        untold = [c.job_id for c in changes if c.final and c.record is None]
        awaited = [job_id for job_id in untold if job_id in self._waiting]
        if not awaited:
            return changes
        records = {record.id: record for record in self._records.many(awaited)}
        return [
            replace(c, record=records[c.job_id]) if c.final and c.job_id in records else c
            for c in changes
        ]

    def _spread(self, changes: Collection[Change]) -> None:
        ended = [change.job_id for change in changes if change.final]
        self._ends.update({change.job_id: change.record for change in changes if change.final})
        while len(self._ends) > MAX_ENDS:
            self._ends.popitem(last=False)
        _wake(self._listeners, {change.job_id for change in changes})
        _wake(self._waiting, ended)
        self._on_changes(changes)


@contextmanager
def _registered(waiters: Waiters, job_id: str) -> Iterator[asyncio.Event]:
    """Give an event that is set when those who wait for the job are woken."""
    woken = asyncio.Event()
    waiters.setdefault(job_id, set()).add(woken)
    try:
        yield woken
    finally:
        waiters[job_id].discard(woken)
        if not waiters[job_id]:
            del waiters[job_id]


def _wake(waiters: Waiters, job_ids: Collection[str]) -> None:
    for job_id in job_ids:
        for woken in waiters.get(job_id, ()):
            woken.set()


async def _wait(woken: asyncio.Event, *, within_s: float) -> None:
    """Wait for an event, which is set at the latest when this time is over."""
    timer = asyncio.get_running_loop().call_later(within_s, woken.set)
    try:
        await woken.wait()
    finally:
        timer.cancel()
