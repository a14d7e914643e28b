"""Bounds what a connection may send before there is a request, and how slowly bytes move on it.

uvicorn's httptools protocol knows no such bounds: httptools appends to a header that comes in many
reads, which copies it each time, and nothing ends a request that is never finished or an answer
that is never read. uvicorn's other implementation has a limit of 64 KiB, and half the throughput.

    head      request line and headers: at most `max_head_bytes`, complete within `head_timeout_s`
    body      its end or `LEAST_BYTES` of it in each `body_timeout_s`, unless the service itself
              does not read on
    trailers  and whatever else the parser makes nothing of: at most `max_head_bytes`, then ignored
    answer    what waits to be sent goes at the pace of a body

The server has every connection look at its own pace once a second (`close_if_slow`).
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass
from enum import Enum, auto
from http import HTTPStatus
from typing import Any, Final

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from gradbox_service.http.problems import MEDIA_TYPE, plain_problem
from gradbox_service.settings import KIB

# The least that moves within `body_timeout_s`: about 1 KiB a second, which no line is too slow for.
# Of an answer it may have to be more: the kernel reports in steps (`listening.UNSENT_BYTES`).
LEAST_BYTES: Final = 64 * KIB

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
        # Of a body, since the pace was last good enough.
        self._body_bytes = 0
        self._heard_s = 0.0
        # What waited to be sent when the pace was last good enough.
        self._unsent_bytes = 0
        self._sent_s = 0.0
        self._unanswered: deque[RequestResponseCycle] = deque()
        self._refused = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._heard_s = self.loop.time()
        # Nothing is written behind what the client has not taken yet: it would only take memory.
        # With 0 uvloop pauses writing over TLS for ever.
        transport.set_write_buffer_limits(high=1)

    def connection_lost(self, exc: Exception | None) -> None:
        for cycle in self._unanswered:  # uvicorn lets the last one alone know
            _disconnect(cycle)
        super().connection_lost(exc)

    def resume_writing(self) -> None:
        self._unsent_bytes = 0
        super().resume_writing()

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

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, "bad-request", msg)

    def on_message_begin(self) -> None:
        self._head_bytes = 0
        super().on_message_begin()
        self.scope["state"]["peer"] = self.client  # a proxy's headers change "client" as they like

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
        if self._head_bytes > self._limits.max_head_bytes:
            self._refuse_head()
        if not self._refused:
            self._awaited = Awaited.BODY
            self._body_bytes = 0
            self._heard_s = self.loop.time()
            super().on_headers_complete()
            self._unanswered.append(self.cycle)

    def on_body(self, body: bytes) -> None:
        if not self._refused:
            self._unparsed_bytes = 0
            self._body_bytes += len(body)
            if self._body_bytes >= LEAST_BYTES:
                self._body_bytes = 0
                self._heard_s = self.loop.time()
            super().on_body(body)

    def on_message_complete(self) -> None:
        if not self._refused:
            self._unparsed_bytes = 0
            self._awaited = Awaited.NOTHING
            super().on_message_complete()

    def on_response_complete(self) -> None:
        self._unanswered.popleft()
        super().on_response_complete()

    def close_if_slow(self) -> None:
        """Close the connection if its client sends too slowly, or does not take its answer."""
        now_s = self.loop.time()
        if self._answer_is_slow(now_s):
            self.transport.abort()  # to close it would be to wait until all is sent
        elif self._awaited is not Awaited.NOTHING and not self.transport.is_closing():
            self._refuse_if_slow(now_s)

    def _answer_is_slow(self, now_s: float) -> bool:
        unsent_bytes = self.transport.get_write_buffer_size()
        moved_bytes = self._unsent_bytes - unsent_bytes
        if not (self._unsent_bytes and unsent_bytes) or moved_bytes >= LEAST_BYTES:
            self._unsent_bytes, self._sent_s = unsent_bytes, now_s
        return now_s - self._sent_s >= self._limits.body_timeout_s

    def _refuse_if_slow(self, now_s: float) -> None:
        if self.flow.read_paused:  # what is awaited may have come long ago
            self._heard_s = now_s
        head = self._awaited is Awaited.HEAD
        limit_s = self._limits.head_timeout_s if head else self._limits.body_timeout_s
        if now_s - self._heard_s >= limit_s:
            what = "its headers" if head else f"its end, or {LEAST_BYTES} bytes more of its body,"
            detail = f"the request did not send {what} within {limit_s:g} s"
            self._refuse(408, "request-timeout", detail)

    def _refuse_head(self) -> None:
        limit = self._limits.max_head_bytes
        detail = f"a request's headers and target have at most {limit} bytes here; send fewer"
        self._refuse(431, "headers-too-large", detail)

    def _refuse(self, status: int, code: str, detail: str) -> None:
        """Answer, unless an answer is under way on this connection, and close it."""
        if self._refused:
            return
        self._refused = True
        if self._unanswered:
            if self._unanswered[0].response_started or self.pipeline:
                self.transport.close()
                return
            _disconnect(self._unanswered[0])  # what the app answers goes nowhere
        text = plain_problem(status, code, detail).model_dump_json(exclude_none=True).encode()
        head = (
            f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\ncontent-type: {MEDIA_TYPE}\r\n"
            f"content-length: {len(text)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + text)
        self.loop.call_later(LINGER_S, self.transport.close)


def _disconnect(cycle: RequestResponseCycle) -> None:
    """Let the app know that its client has left."""
    cycle.disconnected = True
    cycle.message_event.set()
