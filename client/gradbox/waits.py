"""Waiting for any number of jobs with one thread, for those who `await` them.

The thread lists the user's jobs in one request and tells each waiter what it says of its job. It
asks again after a twentieth of the time that it has waited, 50 ms at least and 1 s at most: nobody
learns of an end much later than it took. It ends when nobody waits.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Final
from urllib.parse import quote

from gradbox.errors import GradboxError, ServiceUnavailable
from gradbox.http.connection import Connection, parsed
from gradbox.protocol import JobList, JobView

LISTED: Final = 200
SHORTEST_PAUSE_S: Final = 0.05
LONGEST_PAUSE_S: Final = 1.0
SHARE: Final = 0.05


@dataclass(frozen=True, eq=False)
class Wait:
    """A task that waits for a job; both functions are called by the thread that asks the box."""

    job_id: str
    on_view: Callable[[JobView], None]
    on_error: Callable[[BaseException], None]
    began_s: float


class JobWaits:
    """The waits of one client."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._lock = threading.Lock()
        self._waits: list[Wait] = []
        self._asked_anew = threading.Event()
        self._asking = False
        self._process = os.getpid()

    async def until_over(self, job_id: str, *, on_view: Callable[[JobView], None]) -> JobView:
        """Wait until a job is over, and return what the box says of it then.

        A task that is cancelled stops waiting; the job continues.

        Args:
            on_view: called now and then with the job's view, by the event loop.
        """
        loop = asyncio.get_running_loop()
        over: asyncio.Future[JobView] = loop.create_future()

        def show(view: JobView) -> None:
            on_view(view)
            if view.state.final and not over.done():
                over.set_result(view)

        def fail(error: BaseException) -> None:
            if not over.done():
                over.set_exception(error)

        def in_loop(tell: Callable[..., None]) -> Callable[..., None]:
            def call(*args: object) -> None:
                with suppress(RuntimeError):  # the loop is closed: nobody waits there any more
                    loop.call_soon_threadsafe(tell, *args)

            return call

        wait = Wait(job_id, in_loop(show), in_loop(fail), time.monotonic())
        self._add(wait)
        try:
            return await over
        finally:
            self._remove(wait)

    def _add(self, wait: Wait) -> None:
        """Begin a wait, and the thread that asks the box where there is none."""
        with self._lock:
            if self._process != os.getpid():
                # Forked off: who waited, and the thread that asked, are the other process's.
                self._waits, self._asking, self._process = [], False, os.getpid()
            self._waits.append(wait)
            starts, self._asking = not self._asking, True
        self._asked_anew.set()
        if starts:
            pool = ThreadPoolExecutor(1, thread_name_prefix="gradbox-waits")
            pool.submit(self._ask).add_done_callback(self._ended)
            pool.shutdown(wait=False)

    def _remove(self, wait: Wait) -> None:
        """End a wait; nothing happens if it has ended."""
        with self._lock:
            if wait in self._waits:
                self._waits.remove(wait)
        self._asked_anew.set()

    def close(self) -> None:
        """End all waits with an error."""
        closed = ServiceUnavailable(
            "the client was closed while a job was waited for; the job continues on the box"
        )
        with self._lock:
            waits, self._waits = self._waits, []
        self._asked_anew.set()
        for wait in waits:
            wait.on_error(closed)

    def _ask(self) -> None:
        while True:
            with self._lock:
                waits = list(self._waits)
                if not waits:
                    self._asking = False
                    return
            for wait, answer in self._answers(waits):
                if isinstance(answer, GradboxError):
                    self._remove(wait)
                    wait.on_error(answer)
                    continue
                if answer.state.final:
                    self._remove(wait)
                wait.on_view(answer)
            self._asked_anew.clear()
            waited_s = time.monotonic() - max(wait.began_s for wait in waits)
            self._asked_anew.wait(min(max(SHARE * waited_s, SHORTEST_PAUSE_S), LONGEST_PAUSE_S))

    def _answers(self, waits: list[Wait]) -> Iterator[tuple[Wait, JobView | GradboxError]]:
        """Yield what the box says of each job: those that its list leaves out one by one."""
        try:
            answer = self._connection.request("GET", f"/v1/jobs?limit={LISTED}")
            views = {view.id: view for view in parsed(JobList, answer).jobs}
        except GradboxError as error:
            yield from ((wait, error) for wait in waits)
            return
        for wait in waits:
            found: JobView | GradboxError | None = views.get(wait.job_id)
            yield wait, found or self._one(wait.job_id)

    def _one(self, job_id: str) -> JobView | GradboxError:
        try:
            answer = self._connection.request("GET", f"/v1/jobs/{quote(job_id, safe='')}")
            return parsed(JobView, answer)
        except GradboxError as error:
            return error

    def _ended(self, asking: Future[None]) -> None:
        """Tell the waiters of an error that nobody foresaw, so that none waits for ever."""
        error = asking.exception()
        if error is None:
            return
        with self._lock:
            waits, self._waits = self._waits, []
            self._asking = False
        for wait in waits:
            wait.on_error(error)
