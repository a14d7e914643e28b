"""Gives every request an id, which its answer carries, counts it and logs it in one line.

A refusal is its caller's mistake and one line at INFO, like any other answer, with the code of the
problem; what the service itself failed on has a line at ERROR with its traceback besides
(`http.problems`).
"""

from __future__ import annotations

import logging
import re
import secrets
import time
from typing import Final

from starlette.datastructures import MutableHeaders
from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gradbox_service.watching.metrics import Metrics

log = logging.getLogger(__name__)

# Asked every few seconds by machines: counted, and logged at DEBUG alone.
PROBES: Final = ("/livez", "/readyz", "/metrics")
HEADER: Final = "X-Request-ID"
_ACCEPTED: Final = re.compile(r"[A-Za-z0-9._-]{1,64}")


class RequestWatch:
    """ASGI middleware, the outermost. It takes the id that came, if that is a tidy one."""

    def __init__(self, app: ASGIApp, *, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = HTTPConnection(scope).headers.get(HEADER, "")
        request_id = given if _ACCEPTED.fullmatch(given) else secrets.token_hex(8)
        scope.setdefault("state", {})["request_id"] = request_id
        began = time.perf_counter()
        status, received_bytes, sent_bytes = 499, 0, 0  # 499: the caller left before the answer

        async def counted_receive() -> Message:
            nonlocal received_bytes
            message = await receive()
            received_bytes += len(message.get("body", b""))
            return message

        async def counted_send(message: Message) -> None:
            nonlocal status, sent_bytes
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message).setdefault(HEADER, request_id)
            if scope["method"] != "HEAD":  # whose body the server leaves out
                sent_bytes += len(message.get("body", b""))
            await send(message)

        try:
            await self._app(scope, counted_receive, counted_send)
        finally:
            seconds = time.perf_counter() - began
            route = getattr(scope.get("route"), "path", None) or "other"
            self._metrics.request_ended(
                method=scope["method"],
                route=route,
                status=status,
                seconds=seconds,
                received_bytes=received_bytes,
                sent_bytes=sent_bytes,
            )
            fields = {
                "request": request_id,
                "method": scope["method"],
                "path": scope["path"],
                "status": status,
                "seconds": round(seconds, 4),
                "received_bytes": received_bytes,
                "sent_bytes": sent_bytes,
            }
            if "problem" in scope["state"]:
                fields["problem"] = scope["state"]["problem"]
            level = logging.DEBUG if scope["path"] in PROBES else logging.INFO
            text = " ".join(f"{name}={value}" for name, value in fields.items())
            log.log(level, "request ended: %s", text, extra={"fields": fields})


def request_id_of(request: HTTPConnection) -> str:
    """Return the id of the request."""
    return str(getattr(request.state, "request_id", "none"))
