"""The way to a box for code that runs in an asyncio event loop.

There is one client, `GradClient`. `AsyncGradClient` runs its calls in the event loop's threads, and
waits for jobs, which take long, by one request at a time for all of them (`gradbox.job`): 200
tasks that await 200 jobs take no more threads than one. How many calls, uploads and downloads run
at a time is the loop's to say: `loop.set_default_executor`.

Cancellation. A task that is cancelled stops waiting at once. An upload stops before its next chunk,
and its job is not posted; a download stops likewise. A request that is under way ends by itself:
a job whose post was may run, and `jobs()` lists it. No job is ever cancelled by cancelling a task:
that is `await job.cancel()`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Generator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import httpx

from gradbox.client import GradClient
from gradbox.computations import Computation
from gradbox.computations.computation import Submission
from gradbox.errors import MissingBlobs
from gradbox.html import Listed
from gradbox.http.connection import Retry
from gradbox.http.events import JobEvent
from gradbox.job import QUICK_S, Job, in_thread
from gradbox.protocol import JobList, JobState, JobView, ModelView
from gradbox.results.result import GradResult

if TYPE_CHECKING:
    from gradbox.estimate import Estimate


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
        await asyncio.to_thread(self._client.close)

    async def submit(self, computation: Computation, *, progress: bool | None = None) -> AsyncJob:
        """Upload what the box does not have and post the job, as `GradClient.submit` does.

        Functions are traced before the first await, by the event loop's own thread. Many submits
        may be gathered; a large blob that several jobs need is sent once.
        """
        return AsyncJob(await self._sent(computation, progress))

    async def run(self, computation: Computation, *, progress: bool | None = None) -> GradResult:
        """Submit a job, wait for it and return its result, as `GradClient.run` does.

        It holds a thread for the second that the box may take to answer; `submit` does not.
        """
        job = await self._sent(computation, progress, wait_s=QUICK_S)
        return await AsyncJob(job).result(progress=progress)

    async def estimate(self, computation: Computation, *, progress: bool | None = None) -> Estimate:
        """Say what a job would take, as `GradClient.estimate` does."""
        return await asyncio.to_thread(self._client.estimate, computation, progress=progress)

    async def job(self, job_id: str) -> AsyncJob:
        """Return a handle on a job, as `GradClient.job` does.

        Raises:
            JobNotFound: there is no such job, or it is somebody else's.
        """
        return AsyncJob(await asyncio.to_thread(self._client.job, job_id))

    async def jobs(
        self, *, state: JobState | str | None = None, limit: int | None = None
    ) -> list[AsyncJob]:
        """Return this user's jobs, newest first: all, or at most `limit`, or those in a state."""
        found = await asyncio.to_thread(lambda: list(self._client.jobs(state=state, limit=limit)))
        jobs = (AsyncJob(job) for job in found)
        table = JobList(jobs=[job.view for job in found])
        return Listed(jobs, html=table._repr_html_)

    async def models(self) -> list[ModelView]:
        """Return the registered models with their parameters, entry points and versions."""
        return await asyncio.to_thread(self._client.models)

    async def model_info(self, name: str) -> ModelView:
        """Describe one registered model.

        Raises:
            UnknownModel: there is none of that name.
        """
        return await asyncio.to_thread(self._client.model_info, name)

    async def _sent(
        self, computation: Computation, progress: bool | None, *, wait_s: int = 0
    ) -> Job:
        """Prepare a computation here and send it in a thread, as `Submitter.submit` does in one."""
        submitter = self._client._submitter

        async def send(submission: Submission) -> Job:
            return await in_thread(
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

    def __init__(self, job: Job) -> None:
        self._job = job

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
        return await asyncio.to_thread(self._job.refresh)

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
        return await self._job._awaited(progress=progress)

    async def open(self, *, progress: bool | None = None) -> GradResult:
        """Wait for the job and return its result, which stays on the box: see `Job.open`.

        Indexing its tensors blocks; do so in a thread where that matters.
        """
        await self.wait(progress=progress)
        return await asyncio.to_thread(self._job.open, progress=progress)

    async def fetch(self, path: str | Path, *, progress: bool | None = None) -> None:
        """Write the result of a job that is over to `path`, as `Job.fetch` does."""
        await in_thread(lambda stop: self._job._download(Path(path), progress=progress, stop=stop))

    async def events(self, *, after: str | None = None) -> AsyncIterator[JobEvent]:
        """Iterate over the job's events, from the first one up to that of its final state.

        Every iterator has a thread of its own, which ends with the next sign of life from the box
        (15 s at most) when the iterator is closed or its task is cancelled.

        Args:
            after: the id of an event; only those that follow it, none where it is the final one.
        """
        loop, own_thread = asyncio.get_running_loop(), ThreadPoolExecutor(1)
        events = self._job.events(after=after)
        try:
            while (event := await loop.run_in_executor(own_thread, next, events, None)) is not None:
                yield event
        finally:
            own_thread.shutdown(wait=False)

    async def cancel(self) -> JobView:
        """Cancel the job, as `Job.cancel` does."""
        return await asyncio.to_thread(self._job.cancel)

    async def delete(self) -> None:
        """Delete the result of a job that is over, as `Job.delete` does."""
        await asyncio.to_thread(self._job.delete)
