"""Bounds what a connection may send before there is a request, and how slowly.

uvicorn's httptools protocol knows no such bounds: httptools appends to a header that comes in many
reads, which copies it each time, and nothing ends a request that is never finished. uvicorn's
other implementation has a limit of 64 KiB, and half the throughput.

    head      request line and headers: at most `max_head_bytes`, complete within `head_timeout_s`
    body      never silent for `body_timeout_s`, unless the service itself does not read on
    trailers  and whatever else the parser makes nothing of: at most `max_head_bytes`, then ignored
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from enum import Enum, auto
from http import HTTPStatus
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from gradbox_service.http.problems import MEDIA_TYPE, plain_problem

# A refused connection is read for this long and then closed: closed at once, the kernel would
# answer what is still on its way with a reset, which destroys the refusal at the other side.
LINGER_S = 1.0


@dataclass(frozen=True, kw_only=True)
class ConnectionLimits:
    """What one connection may do."""

    max_head_bytes: int
    head_timeout_s: float
    body_timeout_s: float


class Awaited(Enum):
    """What the connection waits for."""

    NOTHING = auto()
    HEAD = auto()
    BODY = auto()


class BoundedProtocol(HttpToolsProtocol):
    """uvicorn's httptools protocol with `ConnectionLimits`."""

    def __init__(self, *args: Any, limits: ConnectionLimits, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._limits = limits
        self._awaited = Awaited.HEAD
        self._head_bytes = 0
        # Received since the parser last completed a head, a piece of a body or a request.
        self._unparsed_bytes = 0
        self._heard_s = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._refused = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._heard_s = self.loop.time()
        self._wait_on()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        if self._awaited is Awaited.NOTHING:
            self._awaited = Awaited.HEAD
            self._heard_s = self.loop.time()
        self._unparsed_bytes += len(data)
        super().data_received(data)
        if self._unparsed_bytes > self._limits.max_head_bytes:
            self._refuse_head()
        elif self._timer is None and self._awaited is not Awaited.NOTHING and not self._refused:
            self._wait_on()

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, "bad-request", msg)

    def on_message_begin(self) -> None:
        self._head_bytes = 0
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._head_bytes += len(url)
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._awaited is Awaited.BODY:
            return  # a trailer, which must not join the headers of the request that is answered
        self._head_bytes += len(name) + len(value) + 4
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._unparsed_bytes = 0
        self._stop_waiting()
        if self._head_bytes > self._limits.max_head_bytes:
            self._refuse_head()
        if not self._refused:
            self._awaited = Awaited.BODY
            self._heard_s = self.loop.time()
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        if not self._refused:
            self._unparsed_bytes = 0
            self._heard_s = self.loop.time()
            super().on_body(body)

    def on_message_complete(self) -> None:
        if not self._refused:
            self._unparsed_bytes = 0
            self._awaited = Awaited.NOTHING
            self._stop_waiting()
            super().on_message_complete()

    def _wait_on(self) -> None:
        """Look again when the time for what is awaited is over."""
        head = self._awaited is Awaited.HEAD
        limit_s = self._limits.head_timeout_s if head else self._limits.body_timeout_s
        left_s = self._heard_s + limit_s - self.loop.time()
        self._timer = self.loop.call_later(max(0.0, left_s), self._on_time, limit_s)

    def _stop_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _on_time(self, limit_s: float) -> None:
        self._timer = None
        if self.transport.is_closing():
            return
        if self.flow.read_paused:  # what is awaited may have come long ago
            self._heard_s = self.loop.time()
        if self.loop.time() - self._heard_s < limit_s:
            self._wait_on()
            return
        what = "its headers" if self._awaited is Awaited.HEAD else "more of its body"
        self._refuse(408, "request-timeout", f"the request did not send {what} for {limit_s:g} s")

    def _refuse_head(self) -> None:
        limit = self._limits.max_head_bytes
        detail = f"a request's headers and target have at most {limit} bytes here; send fewer"
        self._refuse(431, "headers-too-large", detail)

    def _refuse(self, status: int, code: str, detail: str) -> None:
        """Answer, unless an answer is under way on this connection, and close it."""
        if self._refused:
            return
        self._refused = True
        self._stop_waiting()
        if self.cycle is not None and not self.cycle.response_complete:
            if self.cycle.response_started or self.pipeline:
                self.transport.close()
                return
            # The app hears that its client has left; what it answers goes nowhere.
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        text = plain_problem(status, code, detail).model_dump_json(exclude_none=True).encode()
        head = (
            f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\ncontent-type: {MEDIA_TYPE}\r\n"
            f"content-length: {len(text)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + text)
        self.loop.call_later(LINGER_S, self.transport.close)
