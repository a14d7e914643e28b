"""The pages: files of this package, served under headers that let them load nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from fastapi import APIRouter, Request, Response
from fastapi.staticfiles import StaticFiles

# Scripts and styles of these files alone, no inline ones, and no text ever parsed as HTML.
POLICY: Final = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
HEADERS: Final[Mapping[str, str]] = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=(), payment=(), usb=()",
    # Asked for again each time, and answered with 304 as long as the service is the same.
    "Cache-Control": "no-cache",
}


class DashboardFiles(StaticFiles):
    """The files, under `HEADERS`."""

    def file_response(self, *given: Any, **named: Any) -> Response:
        answer = super().file_response(*given, **named)
        answer.headers.update(HEADERS)
        return answer


def router() -> APIRouter:
    """Return the routes of the dashboard's files."""
    files = DashboardFiles(packages=[(__package__ or "", "static")])
    found = APIRouter(include_in_schema=False)

    @found.api_route("/", methods=["GET", "HEAD"])
    async def dashboard(request: Request) -> Response:
        return await files.get_response("dashboard.html", request.scope)

    @found.api_route("/docs", methods=["GET", "HEAD"])
    async def reference(request: Request) -> Response:
        return await files.get_response("docs.html", request.scope)

    @found.api_route("/static/{name}", methods=["GET", "HEAD"])
    async def static(name: str, request: Request) -> Response:
        return await files.get_response(name, request.scope)

    return found
