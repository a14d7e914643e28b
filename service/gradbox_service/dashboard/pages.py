"""The pages: files of this package, served under headers that let them load nothing else."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Final

from fastapi import APIRouter, Request, Response
from starlette.exceptions import HTTPException

STATIC: Final = resources.files(__package__) / "static"
TYPES: Final[Mapping[str, str]] = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
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


@dataclass(frozen=True)
class Page:
    """A file as it is served."""

    content: bytes
    media_type: str
    etag: str


def router() -> APIRouter:
    """Return the routes of the dashboard's files, which are read once, now."""
    files = _files()
    found = APIRouter(include_in_schema=False)

    @found.api_route("/", methods=["GET", "HEAD"])
    async def dashboard(request: Request) -> Response:
        return _answer(files["dashboard.html"], request)

    @found.api_route("/docs", methods=["GET", "HEAD"])
    async def reference(request: Request) -> Response:
        return _answer(files["docs.html"], request)

    @found.api_route("/static/{name}", methods=["GET", "HEAD"])
    async def static(name: str, request: Request) -> Response:
        if name not in files:
            raise HTTPException(404)
        return _answer(files[name], request)

    return found


def _files() -> dict[str, Page]:
    found = {}
    for path in STATIC.iterdir():
        content = path.read_bytes()
        etag = f'"{hashlib.sha256(content).hexdigest()[:16]}"'
        found[path.name] = Page(content, TYPES[path.name.rpartition(".")[2]], etag)
    return found


def _answer(page: Page, request: Request) -> Response:
    headers = {**HEADERS, "ETag": page.etag}
    if request.headers.get("if-none-match") == page.etag:
        return Response(status_code=304, headers=headers)
    return Response(page.content, headers=headers, media_type=page.media_type)
