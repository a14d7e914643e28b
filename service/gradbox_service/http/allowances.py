"""How many streams and transfers one owner may have open at once.

A transfer is an upload or a download. Each takes a connection, a file and some memory for as long
as it is open, so a route of either kind depends on `stream` or `transfer`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager

from fastapi import Request

from gradbox.errors import TooManyRequests
from gradbox_service.http.auth import Caller
from gradbox_service.settings import Settings


class OpenRequests:
    """Counts the open requests of one kind by owner; for the event loop alone."""

    def __init__(self, limit: int, *, what: str, advice: str) -> None:
        """Count none yet.

        Args:
            what: the kind, as a refusal is to call it; `advice`: what to do instead.
        """
        self._limit = limit
        self._what = what
        self._advice = advice
        self._num_open: Counter[str] = Counter()

    def full(self, owner: str) -> bool:
        """Return whether an owner has as many open as may be."""
        return self._num_open[owner] >= self._limit

    @contextmanager
    def one_more(self, owner: str) -> Iterator[None]:
        """Count a request of an owner's as open until the context ends.

        Raises:
            TooManyRequests: as many are open as may be.
        """
        if self.full(owner):
            raise TooManyRequests(
                f"{self._limit} {self._what} of yours are open, as many as may be on this box: "
                f"{self._advice}"
            )
        self._num_open[owner] += 1
        try:
            yield
        finally:
            self._num_open[owner] -= 1
            if not self._num_open[owner]:
                del self._num_open[owner]


def open_streams(settings: Settings) -> OpenRequests:
    return OpenRequests(
        settings.max_event_streams,
        what="event streams",
        advice="close some, or ask for the jobs' states by GET /v1/jobs",
    )


def open_transfers(settings: Settings) -> OpenRequests:
    return OpenRequests(
        settings.max_transfers,
        what="uploads and downloads",
        advice="read or close some, or ask the box's owner to raise --max-transfers",
    )


async def stream(request: Request, caller: Caller) -> AsyncIterator[None]:
    """Count the request as an open stream until its answer is sent."""
    streams: OpenRequests = request.app.state.streams
    with streams.one_more(caller.name):
        yield


async def transfer(request: Request, caller: Caller) -> AsyncIterator[None]:
    """Count the request as an open transfer until its answer is sent."""
    transfers: OpenRequests = request.app.state.transfers
    with transfers.one_more(caller.name):
        yield
