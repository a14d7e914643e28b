"""What tasks of an event loop wait for: calls that block, and any number of jobs at once.

Of jobs one request tells at a time. Whoever waits asks again after a twentieth of the time that it
has waited, 50 ms at least and 1 s at most: nobody learns of an end much later than it took. The box
lists all of a user's jobs in one answer, and those who ask at about the same time share it: of an
event loop's tasks one asks, in a thread, and the others wait for its answer.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final, TypeVar
from weakref import WeakKeyDictionary

from gradbox.errors import GradboxError
from gradbox.http.connection import Connection, parsed
from gradbox.http.paths import job_path
from gradbox.protocol import JobList, JobView

LISTED: Final = 200
SHORTEST_PAUSE_S: Final = 0.05
LONGEST_PAUSE_S: Final = 1.0
FRACTION: Final = 0.05


T = TypeVar("T")


async def in_thread(function: Callable[[threading.Event], T]) -> T:
    """Return what a call returns that stops once the event which it is given is set.

    It is set where the task that awaits the call is cancelled.
    """
    stop = threading.Event()
    try:
        return await asyncio.to_thread(function, stop)
    finally:
        stop.set()


@dataclass
class Answers:
    """What the box last answered the tasks of one event loop, and when."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    listed: Mapping[str, JobView] | GradboxError = field(default_factory=dict)
    answered_s: float = float("-inf")


class JobWaits:
    """The waits of one client."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._answers: WeakKeyDictionary[asyncio.AbstractEventLoop, Answers] = WeakKeyDictionary()

    async def until_over(self, job_id: str, *, on_view: Callable[[JobView], None]) -> JobView:
        """Wait until a job is over, and return what the box says of it then.

        A task that is cancelled stops waiting; the job continues.

        Args:
            on_view: called now and then with the job's view, by the event loop.

        Raises:
            ServiceUnavailable: the box stayed out of reach, or the client was closed.
        """
        began_s = time.monotonic()
        while True:
            pause_s = min(FRACTION * (time.monotonic() - began_s), LONGEST_PAUSE_S)
            pause_s = max(pause_s, SHORTEST_PAUSE_S)
            view = await self._view(job_id, not_older_s=pause_s / 2)
            on_view(view)
            if view.state.final:
                return view
            await asyncio.sleep(pause_s)

    async def _view(self, job_id: str, *, not_older_s: float) -> JobView:
        """Return what the box says of a job: those that its list leaves out one by one."""
        answers = self._answers.setdefault(asyncio.get_running_loop(), Answers())
        asked_s = time.monotonic()
        async with answers.lock:
            if answers.answered_s < asked_s - not_older_s:
                answers.listed = await asyncio.to_thread(self._list)
                answers.answered_s = time.monotonic()
            if isinstance(answers.listed, GradboxError):
                raise answers.listed  # to all who asked meanwhile, each of whom would wait as long
            if job_id in answers.listed:
                return answers.listed[job_id]
            return await asyncio.to_thread(self._one, job_id)

    def _list(self) -> Mapping[str, JobView] | GradboxError:
        try:
            answer = self._connection.request("GET", f"/v1/jobs?limit={LISTED}")
            return {view.id: view for view in parsed(JobList, answer).jobs}
        except GradboxError as error:
            return error

    def _one(self, job_id: str) -> JobView:
        return parsed(JobView, self._connection.request("GET", job_path(job_id)))
