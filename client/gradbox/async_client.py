"""The way to a box for code that runs in an asyncio event loop.

There is one client, `GradClient`. `AsyncGradClient` runs its calls in a few threads, and waits for
jobs, which take long, by one request at a time for all of them (`gradbox.waits`): 200 tasks that
await 200 jobs take no more threads than one.

Cancellation. A task that is cancelled stops waiting at once. An upload stops before its next chunk,
and its job is not posted; a download stops likewise. A request that is under way ends by itself:
a job whose post was may run, and `jobs()` lists it. No job is ever cancelled by cancelling a task:
that is `await job.cancel()`.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Final, ParamSpec, TypeVar

import httpx

from gradbox.arguments import explain_arguments
from gradbox.client import GradClient
from gradbox.computations import Computation
from gradbox.computations.computation import Submission
from gradbox.errors import MissingBlobs, ServiceUnavailable
from gradbox.html import Listed
from gradbox.http.connection import CLOSED, Retry
from gradbox.http.events import JobEvent
from gradbox.job import QUICK_S, Job
from gradbox.protocol import JobList, JobState, JobView, ModelView
from gradbox.results.result import GradResult

# Calls, uploads and downloads at a time; further ones wait for a thread.
CALLS_AT_ONCE: Final = 8

P = ParamSpec("P")
T = TypeVar("T")


class Calls:
    """Runs calls that block in a few threads."""

    def __init__(self) -> None:
        self._start_pool()
        self._closed = False

    def _start_pool(self) -> None:
        self._pool = ThreadPoolExecutor(CALLS_AT_ONCE, thread_name_prefix="gradbox-async")
        self._process = os.getpid()

    async def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Return what a call returns.

        Raises:
            ServiceUnavailable: the client was closed.
        """
        if self._closed:
            raise ServiceUnavailable(CLOSED)
        if self._process != os.getpid():
            self._start_pool()  # a process that was forked off has none of the threads
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._pool, partial(function, *args, **kwargs))

    async def run_until_cancelled(self, function: Callable[[threading.Event], T]) -> T:
        """Return what a call returns that stops once the event which it is given is set."""
        stop = threading.Event()
        try:
            return await self.run(function, stop)
        finally:
            stop.set()

    def close(self) -> None:
        self._closed = True
        self._pool.shutdown(wait=False)  # calls that wait for a thread find the client closed


@explain_arguments
class AsyncGradClient:
    """A box, as one user sees it; `GradClient` with its calls awaited.

        async with AsyncGradClient() as client:
            job = await client.submit(Gradient(model="minilm", inputs=shards, loss=info_nce))
            result = await job

    Its arguments are those of `GradClient`.
    """

    def __init__(
        self,
        url: str | None = None,
        token: str | None = None,
        *,
        transport: httpx.BaseTransport | None = None,
        timeout_s: float = 60.0,
        retry: Retry | None = None,
    ) -> None:
        self._client = GradClient(url, token, transport=transport, timeout_s=timeout_s, retry=retry)
        self._calls = Calls()

    def __repr__(self) -> str:
        return f"AsyncGradClient({self.url!r})"

    @property
    def url(self) -> str:
        return self._client.url

    async def __aenter__(self) -> AsyncGradClient:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close the connections; jobs continue on the box, and tasks that await one raise."""
        await asyncio.to_thread(self._client.close)  # its own threads may be closed already
        self._calls.close()

    async def submit(self, computation: Computation, *, progress: bool | None = None) -> AsyncJob:
        """Upload what the box does not have and post the job, as `GradClient.submit` does.

        Functions are traced before the first await, by the event loop's own thread. Many submits
        may be gathered; a large blob that several jobs need is sent once.
        """
        return AsyncJob(await self._sent(computation, progress), self._calls)

    async def run(self, computation: Computation, *, progress: bool | None = None) -> GradResult:
        """Submit a job, wait for it and return its result, as `GradClient.run` does.

        It holds a thread for the second that the box may take to answer; `submit` does not.
        """
        job = await self._sent(computation, progress, wait_s=QUICK_S)
        return await AsyncJob(job, self._calls).result(progress=progress)

    async def job(self, job_id: str) -> AsyncJob:
        """Return a handle on a job, as `GradClient.job` does.

        Raises:
            JobNotFound: there is no such job, or it is somebody else's.
        """
        return AsyncJob(await self._calls.run(self._client.job, job_id), self._calls)

    async def jobs(
        self, *, state: JobState | str | None = None, limit: int | None = None
    ) -> list[AsyncJob]:
        """Return this user's jobs, newest first: all, or at most `limit`, or those in a state."""
        found = await self._calls.run(lambda: list(self._client.jobs(state=state, limit=limit)))
        jobs = (AsyncJob(job, self._calls) for job in found)
        table = JobList(jobs=[job.view for job in found])
        return Listed(jobs, html=table._repr_html_)

    async def models(self) -> list[ModelView]:
        """Return the registered models with their parameters, entry points and versions."""
        return await self._calls.run(self._client.models)

    async def model_info(self, name: str) -> ModelView:
        """Describe one registered model.

        Raises:
            UnknownModel: there is none of that name.
        """
        return await self._calls.run(self._client.model_info, name)

    async def _sent(
        self, computation: Computation, progress: bool | None, *, wait_s: int = 0
    ) -> Job:
        """Prepare a computation here and send it in a thread, as `Submitter.submit` does in one."""
        submitter = self._client._submitter

        async def send(submission: Submission) -> Job:
            return await self._calls.run_until_cancelled(
                lambda stop: self._client._send(
                    submission, progress=progress, stop=stop, wait_s=wait_s
                )
            )

        submission = submitter.prepare(computation)
        try:
            return await send(submission)
        except MissingBlobs:
            return await send(submitter.prepare_again(computation, submission))


class AsyncJob:
    """A handle on one job; `Job` with its calls awaited. `await job` gives its result."""

    def __init__(self, job: Job, calls: Calls) -> None:
        self._job = job
        self._calls = calls

    def __repr__(self) -> str:
        return f"<Async{repr(self._job).removeprefix('<')}"

    def _repr_html_(self) -> str:
        return self._job._repr_html_()

    def __await__(self) -> Generator[Any, None, GradResult]:
        return self.result().__await__()

    @property
    def id(self) -> str:
        return self._job.id

    @property
    def view(self) -> JobView:
        """What the box said of the job when it was last asked."""
        return self._job.view

    async def refresh(self) -> JobView:
        """Ask the box how the job is, unless its state is final, and return that."""
        return await self._calls.run(self._job.refresh)

    async def wait(self, *, progress: bool | None = None) -> JobView:
        """Wait until the job is over, however it ends; `asyncio.timeout` bounds it.

        Args:
            progress: as for `Job.wait`.
        """
        return await self._job.wait_async(progress=progress)

    async def result(self, *, progress: bool | None = None) -> GradResult:
        """Wait for the job and fetch its result.

        Raises:
            JobFailed, JobCancelled, ResultGone: as for `Job.result`.
        """
        await self.wait(progress=progress)
        return await self._calls.run_until_cancelled(
            lambda stop: self._job._fetched(progress=progress, stop=stop)
        )

    async def open(self, *, progress: bool | None = None) -> GradResult:
        """Wait for the job and return its result, which stays on the box: see `Job.open`.

        Indexing its tensors blocks; do so in a thread where that matters.
        """
        await self.wait(progress=progress)
        return await self._calls.run(self._job.open, progress=progress)

    async def fetch(self, path: str | Path, *, progress: bool | None = None) -> None:
        """Write the result of a job that is over to `path`, as `Job.fetch` does."""
        await self._calls.run_until_cancelled(
            lambda stop: self._job._download(Path(path), progress=progress, stop=stop)
        )

    async def events(self, *, after: str | None = None) -> AsyncIterator[JobEvent]:
        """Iterate over the job's events, from the first one up to that of its final state.

        Every iterator has a thread of its own, which ends with the next sign of life from the box
        (15 s at most) when the iterator is closed or its task is cancelled.

        Args:
            after: the id of an event; only those that follow it, none where it is the final one.
        """
        loop = asyncio.get_running_loop()
        arrived: asyncio.Queue[JobEvent | None] = asyncio.Queue()
        closed = threading.Event()

        def read() -> None:
            for event in self._job.events(after=after):
                if closed.is_set():
                    return
                loop.call_soon_threadsafe(arrived.put_nowait, event)

        reading = loop.run_in_executor(ThreadPoolExecutor(1), read)
        reading.add_done_callback(lambda _: arrived.put_nowait(None))
        try:
            while (event := await arrived.get()) is not None:
                yield event
            await reading
        finally:
            closed.set()

    async def cancel(self) -> JobView:
        """Cancel the job, as `Job.cancel` does."""
        return await self._calls.run(self._job.cancel)

    async def delete(self) -> None:
        """Delete the result of a job that is over, as `Job.delete` does."""
        await self._calls.run(self._job.delete)
