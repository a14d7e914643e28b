"""Gives every request an id, which its answer carries and the log names."""

from __future__ import annotations

import re
import secrets

from starlette.datastructures import MutableHeaders
from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Message, Receive, Scope, Send

HEADER = "X-Request-ID"
_ACCEPTED = re.compile(r"[A-Za-z0-9._-]{1,64}")


class RequestIds:
    """ASGI middleware: takes the id that the caller sent, if it is a tidy one, or makes one."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = HTTPConnection(scope).headers.get(HEADER, "")
        request_id = given if _ACCEPTED.fullmatch(given) else secrets.token_hex(8)
        scope.setdefault("state", {})["request_id"] = request_id

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).setdefault(HEADER, request_id)
            await send(message)

        await self._app(scope, receive, send_with_id)


def request_id_of(request: HTTPConnection) -> str:
    """Return the id of the request."""
    return str(getattr(request.state, "request_id", "none"))
