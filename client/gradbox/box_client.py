"""What every part of a client stands on: how it reaches its box, and lists what is there."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Final, Self, TypeVar

import httpx

from gradbox.computations.computation import Submission
from gradbox.http.connection import Connection, Retry
from gradbox.http.posting import Answered
from gradbox.job import Job, JobWaits
from gradbox.local import Ended
from gradbox.protocol import BlobList, JobList, RunList
from gradbox.settings import ClientSettings, find_settings
from gradbox.submitting import Submitter

# The most jobs, or runs, that a box lists in one answer.
PAGE: Final = 500
Page = TypeVar("Page", JobList, RunList, BlobList)
Listing = TypeVar("Listing")


class BoxClient:
    """A box, as one user sees it; `GradClient` says what the arguments are."""

    def __init__(
        self,
        url: str | None = None,
        token: str | None = None,
        *,
        transport: httpx.BaseTransport | None = None,
        timeout_s: float = 60.0,
        retry: Retry | None = None,
    ) -> None:
        settings = find_settings(url, token)
        connection = Connection(
            ClientSettings(url=settings.url, token=settings.token),
            transport=transport,
            timeout_s=timeout_s,
            retry=retry,
        )
        self._use(connection, Submitter(connection), results=settings.results)

    def _use(
        self, connection: Connection, submitter: Submitter, *, results: Path | None = None
    ) -> None:
        """Send by these.

        Args:
            results: the box's own folder of results, if it is this machine's.
        """
        self.url = connection.url
        self._connection, self._submitter, self._results = connection, submitter, results
        self._waits = JobWaits(connection)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r})"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections; jobs continue on the box."""
        self._connection.close()

    def _listed(
        self,
        path: str,
        kind: type[Page],
        views: Callable[[Page], list[Listing]],
        asked: Mapping[str, str | None],
        limit: int | None,
    ) -> tuple[Page, Iterator[Listing]]:
        """Return the first page of a list, and all views, whose pages are fetched as they come."""

        def fetch(cursor: str | None, num_wanted: int | None) -> Page:
            size = None if num_wanted is None else str(min(num_wanted, PAGE))
            query = {**asked, "limit": size, "cursor": cursor}
            given = httpx.QueryParams({k: v for k, v in query.items() if v is not None})
            return self._connection.ask(kind, "GET", f"{path}?{given}" if given else path)

        def all_of(page: Page) -> Iterator[Listing]:
            left = limit
            while True:
                yield from views(page)
                left = None if left is None else left - len(views(page))
                if page.next is None or (left is not None and left <= 0):
                    return
                page = fetch(page.next, left)

        first = fetch(None, limit)
        return first, all_of(first)

    def _send(
        self,
        submission: Submission,
        *,
        progress: bool | None = None,
        stop: threading.Event | None = None,
        wait_s: int = 0,
    ) -> Job:
        """Send what was prepared elsewhere; see `Submitter.send`."""
        send = self._submitter.send
        return self._handle(send(submission, progress=progress, stop=stop, wait_s=wait_s))

    def _handle(self, answered: Answered) -> Job:
        return Job(
            self._connection,
            answered.view,
            waits=self._waits,
            result=answered.small,
            results=self._results,
            held=answered.result if isinstance(answered, Ended) else None,
        )
