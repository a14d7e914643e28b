"""How much one owner may ask of the service at once: requests a second, streams, transfers.

A transfer is an upload or a download. Each takes a connection, a file and some memory for as long
as it is open, so a route of either kind depends on `stream` or `transfer`.

Of requests there is a bucket for each owner, in this process: it holds four seconds' worth, so that
a client may work in bursts. It stands before the routes, since refusing is to be cheap, and so it
learns from their answers whose a token or a session is. Until then, and where it is nobody's, the
request counts as one of the address that it came from.
"""

from __future__ import annotations

import math
import time
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from fastapi import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from gradbox.errors import TooManyRequests
from gradbox.protocol import Problem
from gradbox_service.http.auth import Caller, secret_of
from gradbox_service.http.problems import problem_response
from gradbox_service.identity.tokens import digest_of
from gradbox_service.settings import Settings

BURST_S = 4.0
# Senders and tokens remembered; a bucket that is forgotten is full again.
MAX_BUCKETS = 10_000


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


@dataclass
class Bucket:
    """What is left of a sender's allowance, and when that was so."""

    left: float
    at_s: float


class Allowance:
    """The buckets of all senders: owners, and addresses of whom nobody knows."""

    def __init__(self, requests_per_s: float) -> None:
        self._rate = requests_per_s
        self._buckets: OrderedDict[str, Bucket] = OrderedDict()

    def wait_s(self, sender: str) -> float:
        """Take one request from the sender's bucket; return 0, or how long until it holds one."""
        now = time.monotonic()
        full = self._rate * BURST_S
        bucket = self._buckets.pop(sender, None) or Bucket(full, now)
        self._buckets[sender] = bucket
        if len(self._buckets) > MAX_BUCKETS:
            self._buckets.popitem(last=False)
        bucket.left = min(full, bucket.left + (now - bucket.at_s) * self._rate)
        bucket.at_s = now
        if bucket.left < 1.0:
            return (1.0 - bucket.left) / self._rate
        bucket.left -= 1.0
        return 0.0


class RateLimit:
    """ASGI middleware: refuses what an owner sends beyond the allowance.

    Probes carry neither token nor session.
    """

    def __init__(self, app: ASGIApp, *, allowance: Allowance, requests_per_s: int) -> None:
        self._app = app
        self._allowance = allowance
        self._requests_per_s = requests_per_s
        # By the hash of a token or of a session's secret.
        self._owners: OrderedDict[str, str] = OrderedDict()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        secret = secret_of(Request(scope)) if scope["type"] == "http" else ""
        if not secret:
            await self._app(scope, receive, send)
            return
        digest = digest_of(secret)
        wait_s = self._allowance.wait_s(self._owners.get(digest) or _address(scope))
        if not wait_s:
            await self._app(scope, receive, send)
            self._learn(digest, scope)
            return
        problem = Problem.of(
            TooManyRequests(
                f"you sent more than {self._requests_per_s} requests a second for "
                f"{BURST_S:g} s: wait, put small jobs together, or ask the box's owner to raise "
                "--requests-per-s"
            )
        )
        headers = {"Retry-After": str(math.ceil(wait_s))}
        response = problem_response(problem, Request(scope), headers)
        await response(scope, receive, send)

    def _learn(self, digest: str, scope: Scope) -> None:
        """Remember whose the token or session is, where the answer took a look at it."""
        if "owner" not in scope["state"]:
            return
        self._owners.pop(digest, None)
        if (owner := scope["state"]["owner"]) is not None:
            self._owners[digest] = owner
            if len(self._owners) > MAX_BUCKETS:
                self._owners.popitem(last=False)


def _address(scope: Scope) -> str:
    """Return the address of the connection as a sender: with a space, which no owner's name has."""
    host, _port = scope["state"].get("peer") or scope.get("client") or ("unknown", 0)
    return f"address {host}"
