"""One module a noun of the API."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastapi import APIRouter


class Router(APIRouter):
    """Routes of one noun. What answers GET answers HEAD as well (RFC 9110, section 9.3.2).

    The server leaves the body out. Results answer HEAD by themselves, without reading the file; a
    stream of events has no end to wait for, and so no HEAD.
    """

    def add_api_route(self, path: str, endpoint: Callable[..., Any], **given: Any) -> None:
        super().add_api_route(path, endpoint, **given)
        if given.get("methods") == ["GET"] and not path.endswith(("/result", "/events")):
            as_head = {"methods": ["HEAD"], "include_in_schema": False}
            super().add_api_route(path, endpoint, **given | as_head)
