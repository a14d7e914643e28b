"""Jobs: post, list, look at, cancel, and listen to."""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import AsyncIterable, Callable, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import islice
from typing import Annotated, Final

import anyio.to_thread
from fastapi import Depends, Header, Query, Request, Response
from fastapi.sse import EventSourceResponse, ServerSentEvent
from starlette.routing import Route

from gradbox.errors import InvalidRequest, OwnerOnly, Unauthorized
from gradbox.protocol import JobList, JobState, JobView
from gradbox.spans import Spans, read_traceparent
from gradbox_service.admission.posting import Admission, Sent, post
from gradbox_service.backing import Backing
from gradbox_service.http.allowances import OpenRequests, stream
from gradbox_service.http.auth import (
    Box,
    Caller,
    Credentials,
    Listener,
    VisibleJob,
    caller_of,
    credentials_of,
)
from gradbox_service.http.bodies import (
    MAX_BODY_BYTES,
    Bodies,
    Parts,
    announced_bytes,
    is_form,
    read_parts,
)
from gradbox_service.http.event_hub import Hub
from gradbox_service.http.openapi import JOB_ANSWER, JOB_REQUEST, MAX_KEY_LENGTH, PREFER
from gradbox_service.http.routes import Router
from gradbox_service.http.waiting import answer_with, is_answered_at_once, waited_for
from gradbox_service.identity.tokens import TokenInfo
from gradbox_service.jobs import JobRecord, Mark
from gradbox_service.settings import KIB

router = Router(prefix="/v1/jobs", tags=["jobs"])

MAX_LISTED = 500
# A body up to this size is received before its sender is known: uvicorn holds as much unasked.
RECEIVED_UNASKED_BYTES = 64 * KIB
SPANS = Spans("gradbox-service")


@router.post(
    "",
    status_code=202,
    response_model=JobView,
    responses={
        200: {"model": JobView, "description": "The job has ended within the wait", **JOB_ANSWER},
        202: JOB_ANSWER,
    },
    openapi_extra=JOB_REQUEST,
)
async def post_job(request: Request, credentials: Credentials) -> Response:
    """Accept a job, with its small blobs. It then ends in exactly one of done, failed, cancelled.

    `Prefer: wait=N` waits for its end, which is then what the answer says, with status 200.
    """
    at: Admission = request.app.state.admission
    return await take_job(request, credentials, partial(post, at=at))


async def take_job(
    request: Request, credentials: Credentials, post: Callable[[bytes, Sent], JobRecord]
) -> Response:
    """Receive a job with its small blobs, and answer about it as its caller prefers.

    Args:
        post: takes the job's JSON and what came beside it.
    """
    # The headers are read here and not by FastAPI, and a small job's token by the thread that takes
    # its body: that was a tenth of what the service spent on such a job.
    box: Backing = request.app.state.backing
    bodies: Bodies = request.app.state.bodies
    content_type = request.headers.get("content-type", "")
    form = is_form(content_type)
    parent = read_traceparent(request.headers.get("traceparent"))
    known = None
    with ExitStack() as while_received:
        if not 0 < announced_bytes(request) <= RECEIVED_UNASKED_BYTES:
            known = await anyio.to_thread.run_sync(caller_of, request, box, credentials)
            transfers: OpenRequests = request.app.state.transfers
            while_received.enter_context(transfers.one_more(known.name))
        span = while_received.enter_context(SPANS.span("accept", parent=parent))

        def accept(body: bytes) -> tuple[JobRecord, TokenInfo]:
            caller = known or caller_of(request, box, credentials)
            key = idempotency_key(request)
            parts = read_parts(body, content_type=content_type) if form else Parts(body, {})
            bodies.check_job(parts.job)
            sent = Sent(caller, parts.blobs, key, traceparent=parent or span.traceparent)
            return post(parts.job, sent), caller

        limit_bytes = MAX_BODY_BYTES if form else None
        record, caller = await bodies.handle(request, accept, limit_bytes=limit_bytes)
        span.note(
            job=record.id,
            owner=caller.name,
            computation=record.computation,
            model=record.model,
        )
    listener = Listener(request, box=box, credentials=credentials)
    return await answer_about(
        record, request, box=box, caller=caller, listener=listener, posted=True
    )


async def _posted(request: Request) -> Response:
    request.scope["route"] = POSTED
    return await post_job(request, credentials_of(request))


# What FastAPI describes as the route above, without its way to a function: a tenth of a small job.
POSTED: Final = Route("/v1/jobs", _posted, methods=["POST"])


@router.get("")
def list_jobs(
    box: Box,
    caller: Caller,
    state: JobState | None = None,
    limit: Annotated[int, Query(ge=1, le=MAX_LISTED)] = 100,
    everybodys: Annotated[
        bool, Query(alias="all", description="Everybody's; for the box's owner alone")
    ] = False,
    cursor: Annotated[
        str | None, Query(max_length=100, description="`next` of the page before")
    ] = None,
) -> JobList:
    """The caller's jobs, newest first, in pages."""
    if everybodys and not caller.admin:
        raise OwnerOnly(
            "all=true lists everybody's jobs, which only the box's owner may: leave it out, or use "
            "the token that `gradbox up` wrote"
        )
    owners = box.records.owners() if everybodys else [caller.name]
    after = None if cursor is None else mark(cursor)
    # One more than the page, to know whether another follows.
    found = [
        box.records.owned(owner, state=state, limit=limit + 1, after=after) for owner in owners
    ]
    newest_first = heapq.merge(*found, key=lambda r: (r.created_s, r.id), reverse=True)
    records = list(islice(newest_first, limit + 1))
    page, last = records[:limit], records[limit - 1 : limit]
    return JobList(
        jobs=_views(page, box),
        next=f"{last[0].created_s!r}_{last[0].id}" if len(records) > limit else None,
    )


@router.get(
    "/{job_id}",
    response_model=JobView,
    responses={200: JOB_ANSWER},
    openapi_extra={"parameters": [PREFER]},
)
async def one_job(
    request: Request, record: VisibleJob, box: Box, caller: Caller, credentials: Credentials
) -> Response:
    """One job; `Prefer: wait=N` waits for its end."""
    listener = Listener(request, box=box, credentials=credentials)
    return await answer_about(record, request, box=box, caller=caller, listener=listener)


@router.delete("/{job_id}", status_code=202)
def cancel_job(record: VisibleJob, box: Box) -> JobView:
    """Cancel a job: at once if it waits, within a shard if it runs. One that has ended stays so."""
    box.records.update(record.id, partial(JobRecord.request_cancel, now_s=time.time()))
    return (box.records.get(record.id) or record).view()


async def answer_about(
    record: JobRecord,
    request: Request,
    *,
    box: Backing,
    caller: TokenInfo,
    listener: Listener,
    posted: bool = False,
) -> Response:
    """Return the answer about a job once the wait is over that its caller prefers.

    Args:
        posted: see `answer_with`.

    Raises:
        Unauthorized: the token or session ended meanwhile.
    """
    waited = await waited_for(record, request, listener=caller.name)
    if not await listener.is_known():
        raise Unauthorized("the token or session that came ended during the wait: log in again")

    def answer() -> Response:
        return answer_with(
            waited,
            _view(waited.record, box),
            request,
            box=box,
            caller=caller.name,
            posted=posted,
        )

    if is_answered_at_once(waited, request):
        return answer()
    return await anyio.to_thread.run_sync(answer)


def idempotency_key(request: Request) -> str | None:
    """Return the key that makes posting repeatable, if one came.

    Raises:
        InvalidRequest: it is too long, or empty.
    """
    key = request.headers.get("idempotency-key")
    if key is not None and not 1 <= len(key) <= MAX_KEY_LENGTH:
        raise InvalidRequest(
            f"header.idempotency-key: expected 1 to {MAX_KEY_LENGTH} characters, got {len(key)}; "
            "send a fresh UUID with each new job"
        )
    return key


def _view(record: JobRecord, box: Backing) -> JobView:
    return _views([record], box)[0]


def _views(records: Sequence[JobRecord], box: Backing) -> list[JobView]:
    queued = [record.id for record in records if record.state is JobState.QUEUED]
    positions, hold = box.records.positions(queued), box.operation.read().hold if queued else None
    return [_held(record.view(waits_at=positions.get(record.id)), hold) for record in records]


def mark(cursor: str) -> Mark:
    """Return the point in a list that a cursor names.

    Raises:
        InvalidRequest: it names none.
    """
    text, _, job_id = cursor.partition("_")
    try:
        created_s = float(text)
    except ValueError:
        created_s = math.nan
    if not math.isfinite(created_s):
        raise InvalidRequest(
            f"cursor: expected what the page before gave as `next`, got {cursor!r}; leave it out "
            f"for the first page"
        )
    return Mark(created_s, job_id)


def _held(view: JobView, hold: str | None) -> JobView:
    """Say of a job that waits what holds it now: its position may have been worked out before."""
    if view.state is not JobState.QUEUED or hold == view.hold:
        return view
    return view.model_copy(update={"hold": hold, "seconds_left": None})


@router.get(
    "/{job_id}/events",
    response_class=EventSourceResponse,
    dependencies=[Depends(stream)],
)
async def job_events(
    request: Request,
    record: VisibleJob,
    box: Box,
    credentials: Credentials,
    last_event_id: Annotated[str | None, Header()] = None,
) -> AsyncIterable[ServerSentEvent]:
    """`state` events (data: the job) and `progress` events; ends after the final state, and when
    the caller's token is revoked.

    `Last-Event-ID` resumes behind that event; without it the stream begins with the first one kept.
    """
    hub: Hub = request.app.state.hub
    reader = Listener(request, box=box, credentials=credentials)
    async for event in hub.listen(record.id, after=last_event_id):
        if not await reader.is_known():
            return
        yield ServerSentEvent(raw_data=event.data, event=event.kind, id=event.id)
