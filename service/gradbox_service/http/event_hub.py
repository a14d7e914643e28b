"""Events for any number of listeners with one blocking reader a process.

The reader waits on the records' doorbell, which says that a job has something new, and wakes that
job's listeners; each then reads its job's own stream behind the last event it sent. So a listener
misses nothing and sends nothing twice, however the doorbell stutters, and many listeners take one
Redis connection, not one each.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Iterator
from contextlib import contextmanager

import anyio
import anyio.to_thread
import redis

from gradbox.protocol import JobState
from gradbox_service.jobs import Change, Event, JobRecord, Records
from gradbox_service.repeating_thread import RepeatingThread

log = logging.getLogger(__name__)

# The reader looks up from its wait this often, to see whether it is to stop.
WAIT_S = 0.25
# A listener reads on its own after this long: what the doorbell lost while Redis was away.
REREAD_S = 5.0

# By the id of a job: those who wait for something new about it.
Bells = dict[str, set[asyncio.Event]]


class Hub(RepeatingThread):
    """Reads which jobs have new events, and wakes their listeners."""

    def __init__(
        self, records: Records, *, also_tell: Callable[[Collection[Change]], None] | None = None
    ) -> None:
        """Read nothing yet.

        Args:
            also_tell: called with all changes, in the event loop.
        """
        super().__init__("event reader", failed_pause_s=WAIT_S)
        self._records = records
        self._also_tell = also_tell
        self._listeners: Bells = {}
        self._waiting: Bells = {}  # for the end alone
        self._num_open: Counter[str] = Counter()  # by who listens
        self._loop: asyncio.AbstractEventLoop | None = None
        self._cursor: str | None = None

    def start(self) -> None:
        """Begin to read; call it in the event loop that the listeners run in."""
        self._loop = asyncio.get_running_loop()
        super().start()

    def close(self) -> None:
        """End every listener and the reader. May be called twice."""
        super().close()
        for bells in (self._listeners, self._waiting):
            _ring(bells, list(bells))

    def num_open(self, listener: str) -> int:
        """Return how many streams somebody has open."""
        return self._num_open[listener]

    @contextmanager
    def counted(self, listener: str) -> Iterator[None]:
        """Count a stream of somebody's as open until the context ends."""
        self._num_open[listener] += 1
        try:
            yield
        finally:
            self._num_open[listener] -= 1

    async def listen(
        self, job_id: str, *, after: str | None, listener: str = ""
    ) -> AsyncIterator[Event]:
        """Yield the job's events behind `after`; end after the final one, or on `close`."""
        with self.counted(listener), _bell(self._listeners, job_id) as bell:
            while not self._stopping.is_set():
                bell.clear()
                ended, events = await anyio.to_thread.run_sync(self._news, job_id, after)
                for event in events:
                    yield event
                    after = event.id
                if ended or any(event.final for event in events):
                    return
                await _rung(bell)

    async def ended(self, record: JobRecord, *, within_s: float, listener: str = "") -> JobRecord:
        """Return the job's record at its end; as it is once `within_s` is over, or on `close`.

        The wait takes no thread, and counts as an open stream.
        """
        with (
            self.counted(listener),
            _bell(self._waiting, record.id) as bell,
            anyio.move_on_after(within_s),
        ):
            while not self._stopping.is_set():
                bell.clear()
                record = await anyio.to_thread.run_sync(self._newest, record)
                if record.state.final:
                    break
                await _rung(bell)
        return record

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
        except redis.RedisError as error:
            self._cursor = cursor
            log.warning("the events of the box cannot be read (%s); trying again", error)
            self._stopping.wait(WAIT_S)
            return
        if changes and self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._spread, changes)

    def _spread(self, changes: Collection[Change]) -> None:
        _ring(self._listeners, {change.job_id for change in changes})
        _ring(self._waiting, {change.job_id for change in changes if change.final})
        if self._also_tell is not None:
            self._also_tell(changes)


@contextmanager
def _bell(bells: Bells, job_id: str) -> Iterator[asyncio.Event]:
    """Give an event that is set when the job's bells are rung."""
    bell = asyncio.Event()
    bells.setdefault(job_id, set()).add(bell)
    try:
        yield bell
    finally:
        bells[job_id].discard(bell)
        if not bells[job_id]:
            del bells[job_id]


def _ring(bells: Bells, job_ids: Collection[str]) -> None:
    for job_id in job_ids:
        for bell in bells.get(job_id, ()):
            bell.set()


async def _rung(bell: asyncio.Event) -> None:
    """Wait for the bell, or for as long as it may have been missed."""
    with anyio.move_on_after(REREAD_S):
        await bell.wait()
