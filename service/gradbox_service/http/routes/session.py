"""Log in and out of the dashboard: a token in exchange for a cookie that no script can read."""

from __future__ import annotations

from typing import Annotated

from fastapi import Request, Response
from pydantic import BaseModel, Field

from gradbox.errors import Unauthorized
from gradbox.protocol import CallerView
from gradbox_service.http.auth import Box, cookie_name, cookie_secret, refuse_forged
from gradbox_service.http.openapi import DASHBOARD_REQUEST, header
from gradbox_service.http.routes import Router
from gradbox_service.identity.sessions import LIFETIME_S
from gradbox_service.identity.tokens import TokenInfo

router = Router(prefix="/v1/session", tags=["session"])


class LogIn(BaseModel):
    token: Annotated[str, Field(max_length=200)]


class SessionView(BaseModel):
    """Whose session the request's cookie is; null if it is none's."""

    you: CallerView | None


@router.get("")
def session(request: Request, box: Box) -> SessionView:
    """Who is logged in, by the request's cookie."""
    caller = box.sessions.find(cookie_secret(request))
    return SessionView(you=None if caller is None else _view(caller))


@router.post(
    "",
    responses={200: {"headers": {"Set-Cookie": header("The session's cookie")}}},
    openapi_extra=DASHBOARD_REQUEST,
)
def log_in(request: Request, response: Response, wanted: LogIn, box: Box) -> SessionView:
    """Begin a session: sets a cookie, which ends with the token or after seven days."""
    refuse_forged(request)
    token = wanted.token.strip()
    secret = box.sessions.begin(token)
    caller = box.tokens.find(token)
    if secret is None or caller is None:
        raise Unauthorized(
            "this box does not know the token: copy it whole, it begins with gbx_; the box's owner "
            "makes a new one with `gradbox tokens create NAME`"
        )
    response.set_cookie(
        cookie_name(request),
        secret,
        max_age=LIFETIME_S,
        httponly=True,
        samesite="strict",
        secure=request.url.scheme == "https",
    )
    return SessionView(you=_view(caller))


@router.delete("", status_code=204, openapi_extra=DASHBOARD_REQUEST)
def log_out(request: Request, response: Response, box: Box) -> None:
    """End the session of the request's cookie."""
    refuse_forged(request)
    box.sessions.end(cookie_secret(request))
    response.delete_cookie(cookie_name(request), httponly=True, samesite="strict")


def _view(caller: TokenInfo) -> CallerView:
    return CallerView(name=caller.name, admin=caller.admin)
