"""Who is asking: bearer tokens, and whose job is whose."""

from __future__ import annotations

from typing import Annotated, cast

from fastapi import Depends, Request
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer

from gradbox.errors import JobNotFound, Unauthorized
from gradbox_service.backing import Backing
from gradbox_service.jobs import JobRecord
from gradbox_service.tokens import TokenInfo

_bearer = HTTPBearer(auto_error=False, description="A token made by `gradbox tokens create NAME`")


def backing_of(request: Request) -> Backing:
    """Return what the app stands on."""
    return cast(Backing, request.app.state.backing)


Box = Annotated[Backing, Depends(backing_of)]


def caller_of(
    box: Box, credentials: Annotated[HTTPAuthorizationCredentials | None, Depends(_bearer)]
) -> TokenInfo:
    """Return what is known of the request's token: `name` owns jobs and blobs.

    Raises:
        Unauthorized: there is no token, or it is nobody's.
    """
    if credentials is None:
        raise Unauthorized(
            "no token came: send `Authorization: Bearer TOKEN`, or set GRADBOX_TOKEN; the box's "
            "owner makes one with `gradbox tokens create NAME`"
        )
    caller = box.tokens.find(credentials.credentials)
    if caller is None:
        raise Unauthorized(
            "this box does not know the token that came: check GRADBOX_TOKEN and GRADBOX_URL, or "
            "ask the box's owner for a new token"
        )
    return caller


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
