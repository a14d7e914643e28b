"""Who is asking: by a bearer token, or by the cookie of a session; and whose job is whose.

A browser sends a cookie along with what any page makes it ask for. Ours is SameSite=Strict, and a
request by cookie that changes something has to carry a header of its own as well, which a page of
another origin cannot send without asking us first, and we never allow it: not to the origins of
`cors_origin` either, whose pages send a token.
"""

from __future__ import annotations

import time
from typing import Annotated, Final, cast

import anyio.to_thread
import redis
from fastapi import Depends, Request
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from fastapi.security.utils import get_authorization_scheme_param
from starlette.exceptions import HTTPException

from gradbox.errors import JobNotFound, Unauthorized
from gradbox_service.backing import Backing
from gradbox_service.http.request_rate import RequestRate
from gradbox_service.identity.tokens import TokenInfo
from gradbox_service.jobs import JobRecord

_bearer = HTTPBearer(auto_error=False, description="A token made by `gradbox tokens create NAME`")


async def backing_of(request: Request) -> Backing:  # a plain function would be given a thread
    """Return what the app stands on."""
    return cast(Backing, request.app.state.backing)


Box = Annotated[Backing, Depends(backing_of)]


SAFE_METHODS = ("GET", "HEAD", "OPTIONS")
CSRF_HEADER = "X-Gradbox-Dashboard"
# Between two looks at the token of somebody who listens.
LOOK_S: Final = 1.0

Credentials = Annotated[HTTPAuthorizationCredentials | None, Depends(_bearer)]


def credentials_of(request: Request) -> HTTPAuthorizationCredentials | None:
    """Return the bearer token that came, as `Credentials` gives it to a route of FastAPI's."""
    scheme, token = get_authorization_scheme_param(request.headers.get("authorization"))
    if scheme.lower() != "bearer" or not token:
        return None
    return HTTPAuthorizationCredentials(scheme=scheme, credentials=token)


def caller_of(request: Request, box: Box, credentials: Credentials) -> TokenInfo:
    """Return what is known of the request's token: `name` owns jobs and blobs.

    Raises:
        Unauthorized: there is no token and no session, or it is nobody's.
        TooManyRequests: they came too fast.
        HTTPException: another site may have made a browser send this.
    """
    rate: RequestRate = request.app.state.request_rate
    try:
        caller = _found(request, box, credentials)
    except Unauthorized:
        rate.take(_address(request))
        raise
    rate.take(caller.name)
    return caller


def _address(request: Request) -> str:
    """Return the address of the connection as a sender: with a space, which no owner's name has."""
    # As the connection has it: a proxy's headers may say another one in `client`.
    host, _port = getattr(request.state, "peer", None) or request.client or ("unknown", 0)
    return f"address {host}"


def _found(
    request: Request, box: Backing, credentials: HTTPAuthorizationCredentials | None
) -> TokenInfo:
    if credentials is None and (secret := cookie_secret(request)):
        if request.method not in SAFE_METHODS:
            refuse_forged(request)
        by_cookie = box.sessions.find(secret)
        if by_cookie is None:
            raise Unauthorized("the session is over: log in again with your token")
        return by_cookie
    if credentials is None:
        raise Unauthorized(
            "no token came: send `Authorization: Bearer TOKEN`, or set GRADBOX_TOKEN; the box's "
            "owner makes one with `gradbox tokens create NAME`"
        )
    caller = box.tokens.find(credentials.credentials)
    if caller is None:
        raise Unauthorized(
            "this box does not know the token that came: it is wrong, revoked or another box's; "
            "ask the box's owner for a new one, and put it into GRADBOX_TOKEN where that is set, "
            "else run `gradbox login`"
        )
    return caller


class Listener:
    """Who reads an answer that goes on: valid for as long as the token or session it came with."""

    def __init__(
        self, request: Request, *, box: Backing, credentials: HTTPAuthorizationCredentials | None
    ) -> None:
        self._request, self._box, self._credentials = request, box, credentials
        self._looked_at = time.monotonic()

    async def is_known(self) -> bool:
        """Whether that is valid still; looks at most once a second.

        While Redis is away nothing has been heard of its end: the answer goes on.
        """
        if time.monotonic() - self._looked_at < LOOK_S:
            return True
        self._looked_at = time.monotonic()
        try:
            await anyio.to_thread.run_sync(_found, self._request, self._box, self._credentials)
        except Unauthorized:
            return False
        except redis.RedisError:
            return True
        return True


def cookie_name(request: Request) -> str:
    """Return the name of the session's cookie: cookies know no ports, and a host may have boxes."""
    return f"gradbox-{request.url.port or request.url.scheme}"


def cookie_secret(request: Request) -> str:
    """Return the secret of the session that the request's cookie names; "" if there is none."""
    return request.cookies.get(cookie_name(request), "")


def refuse_forged(request: Request) -> None:
    """Refuse what a page of another site may have made a browser send.

    Raises:
        HTTPException: the dashboard's header is missing, or the browser says so itself.
    """
    site = request.headers.get("sec-fetch-site", "same-origin")
    if CSRF_HEADER not in request.headers or site not in ("same-origin", "none"):
        raise HTTPException(
            403,
            f"expected the header {CSRF_HEADER} with a request of the box's own dashboard; a "
            "program sends its token as `Authorization: Bearer TOKEN` instead of a cookie",
        )


Caller = Annotated[TokenInfo, Depends(caller_of)]


def visible_job(job_id: str, box: Box, caller: Caller) -> JobRecord:
    """Return the job of that id if it is the caller's own, or the caller is the box's owner.

    Raises:
        JobNotFound: there is none. Somebody else's job reads the same, so ids cannot be probed.
    """
    record = box.records.get(job_id)
    if record is None or not (caller.admin or record.owner == caller.name):
        raise JobNotFound(
            f"no job {job_id[:80]!r} of yours is on this box; `gradbox jobs list` shows yours"
        )
    return record


VisibleJob = Annotated[JobRecord, Depends(visible_job)]
