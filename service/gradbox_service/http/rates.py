"""How many requests a second one token may send.

A token bucket for each bearer token, in this process: it holds four seconds' worth, so that a
client may work in bursts. It stands before the routes, since refusing is to be cheap, and so it
counts what was sent as a token, valid or not.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections import OrderedDict
from dataclasses import dataclass

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from gradbox.errors import TooManyRequests
from gradbox.protocol import Problem
from gradbox_service.http.problems import problem_response

BURST_S = 4.0
# Tokens remembered; a bucket that is forgotten is full again.
MAX_BUCKETS = 10_000


@dataclass
class Bucket:
    """What is left of a token's allowance, and when that was so."""

    left: float
    at_s: float


class Allowance:
    """The buckets of all tokens."""

    def __init__(self, requests_per_s: float) -> None:
        self._rate = requests_per_s
        self._buckets: OrderedDict[bytes, Bucket] = OrderedDict()

    def wait_s(self, key: bytes) -> float:
        """Take one request from the key's bucket; return 0, or how long until it holds one."""
        now = time.monotonic()
        full = self._rate * BURST_S
        bucket = self._buckets.pop(key, None) or Bucket(full, now)
        self._buckets[key] = bucket
        if len(self._buckets) > MAX_BUCKETS:
            self._buckets.popitem(last=False)
        bucket.left = min(full, bucket.left + (now - bucket.at_s) * self._rate)
        bucket.at_s = now
        if bucket.left < 1.0:
            return (1.0 - bucket.left) / self._rate
        bucket.left -= 1.0
        return 0.0


class RateLimit:
    """ASGI middleware: refuses what a token, or a session, sends beyond its allowance.

    Probes carry neither.
    """

    def __init__(self, app: ASGIApp, *, allowance: Allowance, requests_per_s: int) -> None:
        self._app = app
        self._allowance = allowance
        self._requests_per_s = requests_per_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        token = _token(scope)
        wait_s = self._allowance.wait_s(hashlib.sha256(token).digest()) if token else 0.0
        if not wait_s:
            await self._app(scope, receive, send)
            return
        problem = Problem.of(
            TooManyRequests(
                f"this token sent more than {self._requests_per_s} requests a second for "
                f"{BURST_S:g} s: wait, put small jobs together, or ask the box's owner to raise "
                "--requests-per-s"
            )
        )
        headers = {"Retry-After": str(math.ceil(wait_s))}
        response = problem_response(problem, Request(scope), headers)
        await response(scope, receive, send)


def _token(scope: Scope) -> bytes:
    if scope["type"] != "http":
        return b""
    sent = dict(reversed(scope["headers"]))
    return bytes(sent.get(b"authorization") or sent.get(b"cookie") or b"")
