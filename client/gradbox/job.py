"""A job that a box accepted, seen from here, and the waits of an event loop's tasks for many.

A thread waits for a job by answers that come at the job's end. Tasks ask again after a twentieth of
the time that they have waited, 50 ms at least and 1 s at most: nobody learns of an end much later
than it took. The box lists all of a user's jobs in one answer, and those who ask at about the same
time share it: of an event loop's tasks one asks, in a thread, and the others wait for its answer.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeVar
from weakref import WeakKeyDictionary

import httpx

from gradbox.errors import GradboxError, ServiceUnavailable
from gradbox.http.connection import Connection
from gradbox.http.download import download, verify, why_no_result
from gradbox.http.events import JobEvent, follow
from gradbox.http.paths import job_path
from gradbox.http.posting import ACCEPT, read_answer
from gradbox.progress import ProgressBar, begins_in, downloading, state_and_place
from gradbox.protocol import JobList, JobState, JobView
from gradbox.results.remote_file import RemoteFile
from gradbox.results.result import GradResult
from gradbox.results.result_files import HeldFile, HeldTensors
from gradbox.spans import CLIENT
from gradbox.tensors.checksums import is_whole
from gradbox.written_files import beside

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
            listed = self._connection.ask(JobList, "GET", f"/v1/jobs?limit={LISTED}")
            return {view.id: view for view in listed.jobs}
        except GradboxError as error:
            return error

    def _one(self, job_id: str) -> JobView:
        return self._connection.ask(JobView, "GET", job_path(job_id))


# For how long one answer waits for the end of a job, and so how often a bar shows how far it is.
QUICK_S: Final = 1
# Where none is shown: as long as a box waits.
LONG_S: Final = 30
# Between two answers of a box that waits for nothing.
PAUSE_S: Final = 0.1


class Job:
    """A handle on one job, which continues on the box whatever happens here.

        job = client.submit(Gradient(model="minilm", inputs=shards, loss=info_nce))
        result = job.result()  # or, on another day: GradClient().job(id).result()

    `await job` is `job.result()` for a task, which waits without a thread of its own. A task that
    is cancelled stops waiting.
    """

    def __init__(
        self,
        connection: Connection,
        view: JobView,
        *,
        waits: JobWaits | None = None,
        result: memoryview | None = None,
        results: Path | None = None,
        held: Callable[[], HeldTensors] | None = None,
    ) -> None:
        self._connection = connection
        self._held = held  # of a job of this process: gives its result, or raises why there is none
        self._results = results  # the box's own folder of them, if it is this machine's
        self._view = view
        self._noting = threading.Lock()
        self._small_result = result  # which came with what the box said of the job
        self._waits = waits or JobWaits(connection)

    def __repr__(self) -> str:
        return f"<Job {self.id} {self._view.state.value} at {self._connection.url}>"

    def _repr_html_(self) -> str:
        return self._view._repr_html_()

    def __await__(self) -> Generator[Any, None, GradResult]:
        return self._awaited().__await__()

    @property
    def id(self) -> str:
        return self._view.id

    @property
    def view(self) -> JobView:
        """What the box last said of the job; nothing is asked."""
        return self._view

    @property
    def state(self) -> JobState:
        """The job's state now, for which the box is asked unless it is final."""
        return self.refresh().state

    def refresh(self) -> JobView:
        """Ask the box how the job is, unless its state is final, and return that."""
        return self._view if self._view.state.final else self._request("GET")

    def events(self, *, after: str | None = None) -> Iterator[JobEvent]:
        """Iterate over the job's events as they happen, from the first up to the final state's.

        Args:
            after: the id of an event; only those that follow it, none where it is the final one.
        """
        for event in follow(self._connection, self.id, after=after):
            if event.job is not None:
                self._note(event.job)
            yield event
        self.refresh()

    def wait(self, timeout: float | None = None, *, progress: bool | None = None) -> JobView:
        """Wait until the job is over, however it ends, and return what the box says of it.

        Args:
            timeout: seconds to wait; None waits without end.
            progress: whether to show a progress bar; None shows one on a terminal or in a notebook.

        Raises:
            TimeoutError: the job was not over in time; it continues on the box.
        """
        return self._wait(timeout, progress=progress, accept="application/json")

    def _wait(
        self,
        timeout: float | None,
        *,
        progress: bool | None,
        accept: str,
        bar: ProgressBar | None = None,
    ) -> JobView:
        """Ask how the job is, which the box answers at the job's end or a moment later.

        Args:
            bar: what shows the job, in place of a bar of its own.
        """
        if self._view.state.final:
            return self._view
        deadline_s = float("inf") if timeout is None else time.monotonic() + timeout
        try:
            with bar or ProgressBar(self._title, shown=progress) as bar:
                while not self._view.state.final:
                    left_s = deadline_s - time.monotonic()
                    wait_s = QUICK_S if bar.is_shown or left_s <= LONG_S else LONG_S
                    waited = self._ask(accept, wait_s=wait_s if left_s > wait_s else 0)
                    bar.show_view(self._view)
                    if self._view.state.final:
                        break
                    if left_s <= 0:
                        raise TimeoutError
                    if not waited:
                        time.sleep(min(PAUSE_S, left_s))
        except TimeoutError:
            soon = begins_in(self._view)
            raise TimeoutError(
                f"job {self.id} was not over within {timeout:g} s, and continues on the box: it is "
                f"{state_and_place(self._view)}{soon and f', {soon}'}"
            ) from None
        except KeyboardInterrupt:
            print(
                f"\njob {self.id} continues at {self._connection.url}. To return to it: "
                f"{self._way_back}. To stop it: `gradbox jobs cancel {self.id}`",
                file=sys.stderr,
            )
            raise
        except ServiceUnavailable as error:
            raise self._out_of_reach(error) from error
        return self._view

    @property
    def _way_back(self) -> str:
        return f"GradClient().job({self.id!r}).result(), or `gradbox jobs watch {self.id}`"

    def _out_of_reach(self, error: ServiceUnavailable) -> ServiceUnavailable:
        """Return an error of this job, from one that may end the waits for many."""
        return type(error)(
            f"{error}; job {self.id} stays on the box: wait for it again by {self._way_back}"
        )

    async def wait_async(self, *, progress: bool | None = None) -> JobView:
        """Wait as `wait` does, for a task: many may wait at once with one thread for all.

        Args:
            progress: as for `wait`.

        Raises:
            ServiceUnavailable: the box stayed out of reach, or the client was closed.
        """
        if not self._view.state.final:
            with ProgressBar(self._title, shown=progress) as bar:
                try:
                    self._note(await self._waits.until_over(self.id, on_view=bar.show_view))
                except ServiceUnavailable as error:
                    raise self._out_of_reach(error) from error
        return self._view

    def result(self, timeout: float | None = None, *, progress: bool | None = None) -> GradResult:
        """Wait for the job and fetch its result.

        Args:
            timeout: seconds to wait for the job, without those of fetching; None is without end.
            progress: as for `wait`.

        Raises:
            JobFailed: it failed; the subclass says why.
            JobCancelled: it was cancelled.
            ResultGone: its result was deleted or has expired.
            TimeoutError: it was not over in time; it continues on the box.
        """
        self._wait(timeout, progress=progress, accept=ACCEPT)
        return self._fetched(progress=progress)

    async def _awaited(self, *, progress: bool | None = None) -> GradResult:
        """Wait for the job and fetch its result as `result` does, for a task.

        Args:
            progress: as for `wait`.
        """
        await self.wait_async(progress=progress)
        return await in_thread(lambda stop: self._fetched(progress=progress, stop=stop))

    def _ask(self, accept: str, *, wait_s: int) -> bool:
        """Ask how the job is, and tell whether the box waited for the job's end."""
        path = f"/v1/jobs/{self.id}"
        answer = self._connection.request("GET", path, headers={"Accept": accept}, wait_s=wait_s)
        answered = read_answer(answer)
        self._small_result = answered.small
        self._note(answered.view)
        return "preference-applied" in answer.headers

    def _fetched(self, *, progress: bool | None, stop: threading.Event | None = None) -> GradResult:
        """Open what came already, or fetch it into a folder that is removed with the result."""
        if self._held is not None:
            return GradResult(self._held())
        if (small := self._take_small()) is not None:
            return GradResult(HeldFile(bytes(small)))
        folder = Path(tempfile.mkdtemp(prefix="gradbox-"))
        try:
            path = folder / f"{self.id}.safetensors"
            if not self._linked(path):
                self._download(path, progress=progress, stop=stop)
            return GradResult.owning(path)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise

    def _linked(self, path: Path) -> bool:
        """Give the box's file a second name, if it is on this disk: nothing need be copied.

        One that its disk has damaged is left alone, and what is fetched instead says so.
        """
        view = self.refresh()
        if self._results is None or view.result is None:
            return False
        with suppress(OSError):
            os.link(self._results / f"{self.id}.{view.attempts}.safetensors", path)
        if not path.exists() or path.stat().st_size != view.result.size_bytes or not is_whole(path):
            return False
        with suppress(OSError):
            path.chmod(0o400)  # by which the box knows that the result was fetched
        return True

    def open(self, timeout: float | None = None, *, progress: bool | None = None) -> GradResult:
        """Wait for the job and return its result, which stays on the box.

        Its tensors are `LazyTensor`s: `result.grads["weight"][3:5]` fetches those rows and no
        others. They can be read while the client is open and the box keeps the result;
        `result.save(path)` fetches all of it.

        Args:
            timeout: seconds to wait for the job.
            progress: as for `wait`.

        Raises:
            JobFailed, JobCancelled, ResultGone, TimeoutError: as for `result`.
        """
        self.wait(timeout, progress=progress)
        if self._held is not None:
            return GradResult(self._held())
        view = self.refresh()
        if view.result is None:
            raise why_no_result(view, url=self._connection.url)
        file = RemoteFile(
            self._connection,
            self._result_path,
            expected=view.result,
            downloading=lambda: downloading(self._title, shown=progress),
        )
        return GradResult(file)

    def fetch(self, path: str | Path, *, progress: bool | None = None) -> None:
        """Write the result of a job that is over to `path`, a safetensors file.

        Raises:
            JobFailed, JobCancelled, ResultGone: as for `result`.
            ResultNotReady: the job is not over.
        """
        self._download(Path(path), progress=progress)

    def cancel(self) -> JobView:
        """Cancel the job: at once if it is queued, before its next shard if it runs.

        A job that is over stays as it is.
        """
        return self._view if self._view.state.final else self._request("DELETE")

    def delete(self) -> None:
        """Delete the result of a job that is over, and what the job's record says of it.

        Afterwards `result`, `open` and `fetch` raise ResultGone. Nothing happens if it is gone.

        Raises:
            ResultNotReady: the job is not over: cancel it first.
        """
        self._connection.request("DELETE", self._result_path, accept=(httpx.codes.GONE,))

    def _download(
        self, path: Path, *, progress: bool | None, stop: threading.Event | None = None
    ) -> None:
        if self._held is not None:
            self._held().copy_to(path)
            return
        view = self.refresh()
        if view.result is None:
            raise why_no_result(view, url=self._connection.url)
        if (small := self._take_small()) is not None:
            with beside(path) as written:
                written.write_bytes(small)
            return
        bar = downloading(self._title, shown=progress, stop=stop)
        with bar as show, CLIENT.span("download", parent=view.traceparent, job=self.id):
            download(self._connection, self._result_path, path, expected=view.result, on_bytes=show)

    def _take_small(self) -> memoryview | None:
        """Return the result that came along; once, for the box may have none when asked again."""
        view, (small, self._small_result) = self.refresh(), (self._small_result, None)
        if small is None or view.result is None:
            return None
        verify(small, expected=view.result)
        return small

    def _note(self, view: JobView) -> None:
        """Take what the box said, unless it is older: threads ask at once, and events replay."""
        with self._noting:
            if view.state.stage(view.attempts) >= self._view.state.stage(self._view.attempts):
                self._view = view

    def _request(self, method: str) -> JobView:
        self._note(self._connection.ask(JobView, method, f"/v1/jobs/{self.id}"))
        return self._view

    @property
    def _result_path(self) -> str:
        return f"/v1/jobs/{self.id}/result"

    @property
    def _title(self) -> str:
        return self._view.name or self.id[:12]
