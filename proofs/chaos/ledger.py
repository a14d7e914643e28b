"""What users were promised and what they got, written down as it happens by all of them."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import httpx


@dataclass(frozen=True)
class Accepted:
    """A job that the box accepted, by the unique name that its user gave it."""

    id: str
    name: str
    owner: str
    problem: str


@dataclass
class Ledger:
    """What users saw. Lists are of sentences, each a failure of the box."""

    accepted: list[Accepted] = field(default_factory=list)
    # Names that were submitted, whether or not an answer came.
    submitted: set[str] = field(default_factory=set)
    # Names whose cancellation was asked for.
    cancelled: set[str] = field(default_factory=set)
    num_right: int = 0
    num_cancelled: int = 0
    num_attempts_lost: int = 0
    wrong: list[str] = field(default_factory=list)
    stuck: list[str] = field(default_factory=list)
    doubled: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    server_errors: list[str] = field(default_factory=list)
    # The answers of 400 and above, by status.
    refusals: Counter[int] = field(default_factory=Counter)
    # What the box refused because its disk was full, while it was.
    num_refused_for_storage: int = 0
    # When the disk was full last, in seconds since 1970. Then results go that users have fetched.
    filled_s: float = 0.0
    _storage_full: threading.Event = field(default_factory=threading.Event)
    _storage_full_until: float = 0.0

    @contextmanager
    def storage_full(self) -> Iterator[None]:
        """Mark the time in which the disk is full."""
        self._storage_full.set()
        try:
            yield
        finally:
            self._storage_full_until = time.monotonic() + 15.0
            self.filled_s = time.time()
            self._storage_full.clear()

    @property
    def storage_was_full(self) -> bool:
        """Whether a refusal for want of storage is the truth, or was a moment ago."""
        return self._storage_full.is_set() or time.monotonic() < self._storage_full_until

    def saw(self, answer: httpx.Response) -> None:
        """Note an answer that no user should ever see: a 5xx other than "not now" and "full"."""
        if answer.status_code >= 400:
            self.refusals[answer.status_code] += 1
        if answer.status_code >= 500 and answer.status_code not in (503, 507):
            request = answer.request
            self.server_errors.append(
                f"{request.method} {request.url.path} was answered {answer.status_code}"
            )


class Witness(httpx.HTTPTransport):
    """The network, with every answer shown to the ledger."""

    def __init__(self, ledger: Ledger) -> None:
        super().__init__()
        self._ledger = ledger

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        answer = super().handle_request(request)
        answer.request = request
        self._ledger.saw(answer)
        return answer
