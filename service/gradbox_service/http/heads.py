"""HEAD wherever there is GET (RFC 9110, section 9.3.2): the same answer without its body."""

from __future__ import annotations

import re
from typing import Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

# Blobs and results answer HEAD by themselves, without reading the file; a stream of events has no
# end to wait for, and so no HEAD.
_WITHOUT: Final = re.compile(r"/v1/(blobs/.*|jobs/[^/]+/(result|events)|box/events)")


def answers_as_get(path: str) -> bool:
    """Tell whether HEAD of a path is answered as GET is, where there is GET."""
    return _WITHOUT.fullmatch(path) is None


class Heads:
    """ASGI middleware: has the routes answer HEAD as if it were GET, and keeps the body back."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if (
            scope["type"] != "http"
            or scope["method"] != "HEAD"
            or not answers_as_get(scope["path"])
        ):
            await self._app(scope, receive, send)
            return
        as_get = {**scope, "method": "GET"}

        async def without_body(message: Message) -> None:
            if message["type"] == "http.response.body":
                message = {**message, "body": b""}
            await send(message)

        try:
            await self._app(as_get, receive, without_body)
        finally:
            scope["route"] = as_get.get("route")  # which the log and the metrics name
