"""What a body may have at most where it is neither a blob nor a posted job: a few values.

FastAPI reads such a body whole, and parses it, before it looks at who sends it.
"""

from __future__ import annotations

from typing import Final

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gradbox.errors import BlobTooLarge
from gradbox.protocol import Problem
from gradbox_service.http.bodies import announced_bytes
from gradbox_service.http.problems import problem_response
from gradbox_service.settings import KIB

SMALL_BYTES: Final = 4 * KIB


class SmallBodies:
    """ASGI middleware: refuses a larger body, but where the route reads it by itself."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or _reads_by_itself(scope):
            await self._app(scope, receive, send)
            return
        request = Request(scope)
        size_bytes = announced_bytes(request)
        received: list[Message] = []
        more = size_bytes > 0 or "transfer-encoding" in request.headers
        while more and size_bytes <= SMALL_BYTES:
            received.append(await receive())
            size_bytes = sum(len(message.get("body", b"")) for message in received)
            more = received[-1].get("more_body", False)
        if size_bytes > SMALL_BYTES:
            too_large = BlobTooLarge(
                f"expected a body of at most {SMALL_BYTES} bytes for {scope['method']} "
                f"{scope['path']}, got more; jobs go to POST /v1/jobs, tensors to PUT "
                "/v1/blobs/{sha256}"
            )
            await problem_response(Problem.of(too_large), request)(scope, receive, send)
            return
        received.reverse()

        async def again() -> Message:
            return received.pop() if received else await receive()

        await self._app(scope, again, send)


def _reads_by_itself(scope: Scope) -> bool:
    """Tell whether the request is one of those whose body has limits of its own."""
    method: str = scope["method"]
    path: str = scope["path"]
    return (method == "PUT" and path.startswith("/v1/blobs/")) or (
        method == "POST" and path == "/v1/jobs"
    )
