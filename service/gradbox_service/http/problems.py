"""Every error that leaves the service, as problem+json. No traceback ever does."""

from __future__ import annotations

import errno
import logging
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any, Final, cast

import redis
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.routing import Match

from gradbox.errors import (
    BoxDraining,
    Category,
    GradboxError,
    MissingBlobs,
    RunConflict,
    ServiceUnavailable,
)
from gradbox.protocol import Problem
from gradbox.protocol.problem import URN
from gradbox_service.admission.quota import QuotaReached
from gradbox_service.database.refusals import store_refuses, why_refused
from gradbox_service.store.room import DISK_REFUSES, Room
from gradbox_service.watching.requests import HEADER, request_id_of

log = logging.getLogger(__name__)

MEDIA_TYPE = "application/problem+json"
RETRY_AFTER_S = 2
# Longer than clients wait unless they are asked to: they are to know at once.
RETRY_AFTER_LONG_S: Final[Mapping[type[GradboxError], int]] = {BoxDraining: 120}


def install(app: FastAPI) -> None:
    """Let every exception of the app become a problem."""
    app.add_exception_handler(GradboxError, _known)
    app.add_exception_handler(HTTPException, _http)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(ClientDisconnect, _disconnected)
    app.add_exception_handler(redis.RedisError, _redis_refuses)
    app.add_exception_handler(OSError, _system_refuses)
    app.add_exception_handler(Exception, _unexpected)


def problem_response(
    problem: Problem, request: Request, headers: Mapping[str, str] | None = None
) -> Response:
    """Return the response that says `problem`."""
    request.state.problem = problem.code  # for the log's line about the request
    found = problem.model_copy(update={"request_id": request_id_of(request)})
    extra = {HEADER: request_id_of(request), **(headers or {})}
    if problem.category == "transient":
        extra.setdefault("Retry-After", str(RETRY_AFTER_S))
    if problem.status == HTTPStatus.UNAUTHORIZED:
        extra.setdefault("WWW-Authenticate", 'Bearer realm="gradbox"')
    return Response(
        found.model_dump_json(exclude_none=True),
        status_code=problem.status,
        headers=extra,
        media_type=MEDIA_TYPE,
    )


def plain_problem(status: int, code: str, detail: str, *, category: Category = "user") -> Problem:
    """Return a problem that has no exception class of its own."""
    return Problem(
        type=URN + code,
        title=HTTPStatus(status).phrase,
        status=status,
        detail=detail,
        category=category,
    )


async def _known(request: Request, error: Exception) -> Response:
    extra: dict[str, Any] = {}
    if isinstance(error, MissingBlobs):
        extra = {"missing": list(error.missing)}
    elif isinstance(error, RunConflict):
        extra = {"num_steps": error.num_steps, "under_way": error.under_way}
    after_s = RETRY_AFTER_LONG_S.get(type(cast(GradboxError, error)))
    if isinstance(error, QuotaReached):
        after_s = error.retry_after_s
    headers = None if after_s is None else {"Retry-After": str(after_s)}
    return problem_response(Problem.of(cast(GradboxError, error), **extra), request, headers)


async def _http(request: Request, error: Exception) -> Response:
    refusal = cast(HTTPException, error)
    phrase = HTTPStatus(refusal.status_code).phrase
    detail = str(refusal.detail)
    if detail == phrase:
        call = f"{request.method} {request.url.path}"
        detail = f"{call}: {phrase.lower()}; /openapi.json lists the calls that there are"
    code = phrase.lower().replace(" ", "-")
    category: Category = "user" if refusal.status_code < 500 else "server"
    problem = plain_problem(refusal.status_code, code, detail, category=category)
    headers = refusal.headers
    if refusal.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        headers = {"Allow": ", ".join(_allowed_methods(request))}
    return problem_response(problem, request, headers)


def _allowed_methods(request: Request) -> list[str]:
    """Return the methods that the request's path knows: the router names those of one route."""
    return [
        method
        for method in ("GET", "HEAD", "PUT", "POST", "DELETE")
        if any(
            route.matches({**request.scope, "method": method})[0] is Match.FULL
            for route in request.app.routes
        )
    ]


async def _invalid(request: Request, error: Exception) -> Response:
    lines = []
    for item in cast(RequestValidationError, error).errors()[:5]:
        where = ".".join(str(part) for part in item["loc"])
        lines.append(f"{where}: {item['msg']} (got {repr(item.get('input'))[:120]})")
    return problem_response(plain_problem(422, "invalid-request", "; ".join(lines)), request)


async def _disconnected(request: Request, _: Exception) -> Response:
    problem = plain_problem(400, "incomplete-body", "the connection closed before the body ended")
    return problem_response(problem, request)


async def _redis_refuses(request: Request, error: Exception) -> Response:
    if not store_refuses(error):
        return await _unexpected(request, error)
    log.warning("request %s: Redis refuses for now: %s", request_id_of(request), error)
    refused = ServiceUnavailable(f"the box's Redis {why_refused(error)}")
    return problem_response(Problem.of(refused), request)


async def _system_refuses(request: Request, error: Exception) -> Response:
    refusal = cast(OSError, error)
    if refusal.errno in DISK_REFUSES:
        room: Room = request.app.state.backing.blobs.room
        return problem_response(Problem.of(room.refusal(refusal, what="this request")), request)
    if refusal.errno not in (errno.EMFILE, errno.ENFILE):
        return await _unexpected(request, error)
    log.warning("request %s: %s; raise `ulimit -n`", request_id_of(request), error)
    refused = ServiceUnavailable(
        "the service has as many files and connections open as its system allows: try again in a "
        "few seconds; the box's owner can raise its limit of open files (`ulimit -n`)"
    )
    return problem_response(Problem.of(refused), request)


async def _unexpected(request: Request, error: Exception) -> Response:
    number = request_id_of(request)
    log.error("request %s: %s %s failed", number, request.method, request.url.path, exc_info=error)
    detail = f"the service failed on this request; tell the box's owner the request id {number}"
    return problem_response(plain_problem(500, "error", detail, category="server"), request)
