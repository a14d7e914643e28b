"""A box's answers by hand, for faults that no real box makes on demand."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import httpx

from gradbox import GradboxError, GradClient, Retry
from gradbox.protocol import JobState, JobView, Problem, ResultView

QUICK = Retry(patience_s=0.5, first_pause_s=0.001, longest_pause_s=0.01)
Handler = Callable[[httpx.Request], httpx.Response]


def client_of(handler: Handler, *, retry: Retry = QUICK) -> GradClient:
    return GradClient("http://box", "token", transport=httpx.MockTransport(handler), retry=retry)


def job_view(
    state: JobState = JobState.QUEUED,
    *,
    result: ResultView | None = None,
    error: GradboxError | None = None,
) -> JobView:
    return JobView(
        id="j1",
        state=state,
        computation="gradient",
        model="m",
        owner="ada",
        created_s=0.0,
        result=result,
        error=None if error is None else Problem.of(error),
    )


def answer(view: JobView) -> httpx.Response:
    return httpx.Response(200, content=view.model_dump_json())


def problem(error: GradboxError, *, headers: dict[str, str] | None = None) -> httpx.Response:
    found = Problem.of(error, request_id="r1")
    return httpx.Response(
        found.status,
        content=found.model_dump_json(),
        headers={"Content-Type": "application/problem+json", **(headers or {})},
    )


class Broken(httpx.SyncByteStream):
    """A body whose connection breaks after some pieces."""

    def __init__(self, *pieces: bytes) -> None:
        self._pieces = pieces

    def __iter__(self) -> Iterator[bytes]:
        yield from self._pieces
        raise httpx.ReadError("connection reset")
