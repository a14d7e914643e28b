"""One module a noun of the API."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.routing import APIRoute

from gradbox_service.http.bodies import small_body


class _Route(APIRoute):
    """A route. What FastAPI parses of a request is read here, and bounded."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handle_small(request: Request) -> Response:
            request._body = await small_body(request)
            return await handle(request)

        return handle if self.body_field is None else handle_small


class Router(APIRouter):
    """Routes of one noun. What answers GET answers HEAD as well (RFC 9110, section 9.3.2).

    The server leaves the body out. Results answer HEAD by themselves, without reading the file; a
    stream of events has no end to wait for, and so no HEAD.
    """

    def __init__(self, **given: Any) -> None:
        super().__init__(route_class=_Route, **given)

    def add_api_route(self, path: str, endpoint: Callable[..., Any], **given: Any) -> None:
        super().add_api_route(path, endpoint, **given)
        if given.get("methods") == ["GET"] and not path.endswith(("/result", "/events")):
            as_head = {"methods": ["HEAD"], "include_in_schema": False}
            super().add_api_route(path, endpoint, **given | as_head)
