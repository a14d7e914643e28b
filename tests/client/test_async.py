"""`await job`, and the client for event loops: the same calls, and one thread for all waits."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import TypeVar

import httpx
import pytest
import torch
from torch import Tensor

from gradbox import (
    AsyncGradClient,
    GradClient,
    Gradient,
    GradResult,
    InvalidInputs,
    JobCancelled,
    JobFailed,
    JobNotFound,
    JobState,
    ServiceUnavailable,
    progress,
)
from gradbox.protocol import JobList, ResultView
from tests.boxes import TestBox
from tests.client.wires import QUICK, answer, client_of, job_view

WAIT_S = 120.0
T = TypeVar("T")


def ran(main: Callable[[], Awaitable[T]]) -> T:
    async def bounded() -> T:
        return await asyncio.wait_for(main(), WAIT_S)

    return asyncio.run(bounded())


def gradient(num_rows: int = 2) -> Gradient:
    return Gradient(model="mlp", inputs=[torch.ones(num_rows, 5).double()], loss=lambda z: z.sum())


def slow(num_shards: int) -> Gradient:
    return Gradient(
        model="slow",
        inputs=[torch.ones(2, 3) for _ in range(num_shards)],
        loss=lambda z: z.square().sum(),
    )


def async_client(box: TestBox) -> AsyncGradClient:
    return AsyncGradClient(box.url, box.token, transport=box.transport)


def test_jobs_are_submitted_followed_and_fetched(box: TestBox) -> None:
    async def main() -> None:
        async with async_client(box) as client:
            assert "mlp" in [model.name for model in await client.models()]
            assert (await client.model_info("mlp")).name == "mlp"
            job = await client.submit(slow(3))
            events = [event async for event in job.events()]
            assert events[-1].final
            result = await job
            assert isinstance(result, GradResult)
            assert job.view.state is JobState.DONE
            again = await client.job(job.id)
            assert (await again.result()).loss == result.loss
            assert job.id in [other.id for other in await client.jobs(limit=20)]
            with pytest.raises(JobNotFound):
                await client.job("no-such-job")

    ran(main)


def test_a_job_of_the_plain_client_can_be_awaited(twin: TestBox) -> None:
    async def main() -> float:
        with twin.client() as client:
            return (await client.submit(gradient())).loss

    assert ran(main) == twin.result_of(gradient()).loss


def test_a_task_runs_a_job(twin: TestBox) -> None:
    async def main() -> float:
        async with async_client(twin) as client:
            return (await client.run(gradient())).loss

    with twin.client() as client:
        assert ran(main) == client.run(gradient()).loss


def test_many_jobs_are_gathered(twin: TestBox, uploads: list[str]) -> None:
    constant = torch.randn(30_000, 5).double()  # more than comes with a job in one body
    computations = [
        Gradient(model="mlp", inputs=[constant], loss=lambda z, k=k: k * z.sum()) for k in range(6)
    ]

    async def main() -> list[GradResult]:
        async with async_client(twin) as client:
            jobs = await asyncio.gather(*map(client.submit, computations))
            return await asyncio.gather(*(job.result() for job in jobs))

    losses = [result.loss for result in ran(main)]
    assert losses == pytest.approx([k * losses[1] for k in range(6)])
    assert len(uploads) == 1


def test_failures_are_raised_where_they_are_awaited(twin: TestBox) -> None:
    async def main() -> None:
        async with async_client(twin) as client:
            job = await client.submit(
                Gradient(model="mlp", inputs=[torch.ones(2, 7).double()], loss=lambda z: z.sum())
            )
            with pytest.raises(JobFailed, match="takes 5 features"):
                await job
            waiting = await client.submit(slow(200))
            task = asyncio.ensure_future(waiting.result())
            await asyncio.sleep(0.2)
            await waiting.cancel()
            with pytest.raises(JobCancelled):
                await task
            with pytest.raises(InvalidInputs):
                await client.submit(Gradient(model="mlp", inputs=[], loss=lambda z: z.sum()))

    ran(main)


def test_a_cancelled_task_leaves_its_job_alone(twin: TestBox) -> None:
    async def main() -> JobState:
        async with async_client(twin) as client:
            job = await client.submit(slow(8))
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.2):
                    await job
            return (await job.wait()).state

    assert ran(main) is JobState.DONE


class ManyJobs:
    """A box with any number of jobs, which are done after a while."""

    def __init__(self, num_jobs: int, *, listed: int) -> None:
        self._ids = [f"j{index}" for index in range(num_jobs)]
        self._listed = listed
        self._began_s = time.monotonic()
        self.threads: set[int] = set()
        self.num_requests = 0

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.num_requests += 1
        self.threads.add(threading.get_ident())
        over = time.monotonic() - self._began_s > 0.4
        view = job_view(JobState.CANCELLED if over else JobState.RUNNING)
        if request.url.path == "/v1/jobs":
            views = [view.model_copy(update={"id": i}) for i in self._ids[-self._listed :]]
            return httpx.Response(200, content=JobList(jobs=views).model_dump_json())
        return answer(view.model_copy(update={"id": request.url.path.rpartition("/")[2]}))


def test_two_hundred_waits_take_one_thread() -> None:
    box = ManyJobs(200, listed=195)
    transport = httpx.MockTransport(box)

    async def main() -> None:
        client = AsyncGradClient("http://box", "token", transport=transport, retry=QUICK)
        async with client:
            jobs = await asyncio.gather(*(client.job(f"j{index}") for index in range(200)))
            views = await asyncio.gather(*(job.wait() for job in jobs))
            assert {view.state for view in views} == {JobState.CANCELLED}

    ran(main)
    assert len(box.threads) <= 10
    assert box.num_requests < 400


def test_closing_the_client_ends_every_wait() -> None:
    transport = httpx.MockTransport(ManyJobs(1, listed=1))

    async def main() -> None:
        client = AsyncGradClient("http://box", "token", transport=transport, retry=QUICK)
        job = await client.job("j0")
        waiting = asyncio.ensure_future(job.wait())
        await asyncio.sleep(0.05)
        await client.aclose()
        with pytest.raises(ServiceUnavailable, match="closed"):
            await waiting

    ran(main)


def test_a_closed_client_says_so_and_may_be_closed_again() -> None:
    transport = httpx.MockTransport(ManyJobs(1, listed=1))

    async def main() -> None:
        client = AsyncGradClient("http://box", "token", transport=transport, retry=QUICK)
        for _ in range(2):
            await client.aclose()
            with pytest.raises(ServiceUnavailable, match="was closed; make another"):
                await client.job("j0")

    ran(main)
    client = GradClient("http://box", "token", transport=transport, retry=QUICK)
    client.close()
    with pytest.raises(ServiceUnavailable, match="was closed; make another"):
        client.job("j0")


def test_a_box_that_is_gone_ends_every_wait() -> None:
    answers = [answer(job_view(JobState.RUNNING))]

    def handler(request: httpx.Request) -> httpx.Response:
        if answers:
            return answers.pop()
        raise httpx.ConnectError("refused")

    job = client_of(handler).job("j1")
    with pytest.raises(ServiceUnavailable, match="cannot connect"):
        ran(job.wait_async)


def test_an_upload_stops_when_its_task_is_cancelled() -> None:
    begun, posted = threading.Event(), threading.Event()

    def handler(request: httpx.Request) -> httpx.Response:
        if request.method == "HEAD":
            return httpx.Response(404)
        if request.method == "POST":
            posted.set()
            return answer(job_view())
        begun.set()
        time.sleep(0.2)
        return httpx.Response(201)

    async def main() -> None:
        transport = httpx.MockTransport(handler)
        async with AsyncGradClient("http://box", "t", transport=transport, retry=QUICK) as client:
            task = asyncio.ensure_future(client.submit(gradient(50_000)))
            assert await asyncio.to_thread(begun.wait, 10)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await asyncio.sleep(0.5)

    ran(main)
    assert not posted.is_set()


class SlowBody(httpx.SyncByteStream):
    """A body of a hundred pieces, twenty a second."""

    def __init__(self) -> None:
        self.num_given = 0

    def __iter__(self) -> Iterator[bytes]:
        for _ in range(100):
            self.num_given += 1
            yield b"x" * 1000
            time.sleep(0.05)


def test_a_download_stops_when_its_task_is_cancelled() -> None:
    body = SlowBody()
    done = job_view(JobState.DONE, result=ResultView(size_bytes=100_000, sha256="0" * 64))

    def handler(request: httpx.Request) -> httpx.Response:
        if request.url.path.endswith("/result"):
            return httpx.Response(200, stream=body)
        return answer(done)

    async def main() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await client_of(handler).job("j1")

    ran(main)  # the event loop waits for the thread that downloads
    assert 0 < body.num_given < 50


def test_a_bar_that_was_asked_for_shows_a_result_that_is_saved_later(
    twin: TestBox,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(progress, "SHOWN_BYTES", 1)

    async def main() -> None:
        async with async_client(twin) as client:
            job = await client.submit(gradient(8))
            (await job.open(progress=True)).save(tmp_path / "shown")
            assert "fetching" in capsys.readouterr().err

    ran(main)


def test_losses_are_traced_before_the_first_await(twin: TestBox) -> None:
    def branching(z: Tensor) -> Tensor:
        return z.sum() if z.sum() > 0 else z.mean()

    async def main() -> None:
        async with async_client(twin) as client:
            with pytest.raises(ValueError, match=r"client\.model"):
                await client.submit(Gradient(model="mlp", inputs=[torch.ones(1)], loss=branching))

    ran(main)
