"""Jobs: post, list, look at, cancel, and listen to."""

from __future__ import annotations

import heapq
import time
from collections.abc import AsyncIterable, Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Annotated, Final, TypeVar

import anyio.to_thread
from fastapi import Depends, Header, Request, Response
from fastapi.sse import EventSourceResponse, ServerSentEvent
from starlette.routing import Route

from gradbox.errors import InvalidRequest, JobNotFound, Unauthorized
from gradbox.protocol import CodeForm, JobList, JobState, JobView
from gradbox.protocol.again import code_of
from gradbox.spans import Spans, read_traceparent
from gradbox_service.admission.posting import Sent, post, posted_again
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
from gradbox_service.http.openapi import (
    IDEMPOTENCY_KEY,
    JOB_ANSWER,
    MAX_KEY_LENGTH,
    PREFER,
    SPEC_ANSWER,
    any_of,
    posts_a_job,
    with_blobs,
)
from gradbox_service.http.paging import Cursor, Everybodys, Limit, behind, check_may_list, page_of
from gradbox_service.http.routes import Router
from gradbox_service.http.waiting import answer_with, is_answered_at_once, waited_for
from gradbox_service.identity.tokens import TokenInfo
from gradbox_service.jobs import JobRecord
from gradbox_service.settings import KIB

router = Router(prefix="/v1/jobs", tags=["jobs"])

# A body up to this size is received before its sender is known: uvicorn holds as much unasked.
RECEIVED_UNASKED_BYTES = 64 * KIB
SPANS = Spans("gradbox-service")
Made = TypeVar("Made")


@router.post(
    "",
    **posts_a_job(
        with_blobs(any_of("JobSpec", "CotangentGradientSpec")),
        ended="The job has ended within the wait",
        parameters=[IDEMPOTENCY_KEY],
    ),
)
async def post_job(request: Request, credentials: Credentials) -> Response:
    """Accept a job, with its small blobs. It then ends in exactly one of done, failed, cancelled.

    `Prefer: wait=N` waits for its end, which is then what the answer says, with status 200.
    """
    return await take_job(request, credentials, post)


async def take_spec(request: Request, credentials: Credentials, make: Callable[..., Made]) -> Made:
    """Receive what a run or a store is to be, and return what `make` makes of it.

    Args:
        make: takes the JSON, what came beside it (`sent`), and what it is checked against (`at`).
    """
    box: Backing = request.app.state.backing
    bodies: Bodies = request.app.state.bodies
    caller = await anyio.to_thread.run_sync(caller_of, request, box, credentials)
    sent = Sent(caller, idempotency_key=idempotency_key(request))
    return await bodies.handle(request, partial(make, sent=sent, at=request.app.state.admission))


async def take_job(
    request: Request, credentials: Credentials, post: Callable[..., JobRecord]
) -> Response:
    """Receive a job with its small blobs, and answer about it as its caller prefers.

    Args:
        post: as `make` of `take_spec`.
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
            return post(parts.job, sent=sent, at=request.app.state.admission), caller

        limit_bytes = MAX_BODY_BYTES if form else None
        record, caller = await bodies.handle(request, accept, limit_bytes=limit_bytes)
        span.note(
            job=record.id,
            owner=caller.name,
            computation=record.computation,
            model=record.model,
        )
    return await answer_about(record, request, credentials, caller=caller, posted=True)


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
    limit: Limit = 100,
    everybodys: Everybodys = False,
    cursor: Cursor = None,
) -> JobList:
    """The caller's jobs, newest first, in pages."""
    check_may_list(caller, everybodys=everybodys, what="jobs")
    owners = box.records.owners() if everybodys else [caller.name]
    after = behind(cursor)
    found = [  # one more than the page, see `page_of`
        box.records.owned(owner, state=state, limit=limit + 1, after=after) for owner in owners
    ]
    newest_first = heapq.merge(*found, key=lambda r: (r.created_s, r.id), reverse=True)
    page, following = page_of(newest_first, limit=limit)
    return JobList(jobs=_views(page, box), next=following)


@router.get(
    "/{job_id}",
    response_model=JobView,
    responses={200: JOB_ANSWER},
    openapi_extra={"parameters": [PREFER]},
)
async def one_job(
    request: Request, record: VisibleJob, caller: Caller, credentials: Credentials
) -> Response:
    """One job; `Prefer: wait=N` waits for its end."""
    return await answer_about(record, request, credentials, caller=caller)


@router.get("/{job_id}/spec", response_class=Response, responses={200: SPEC_ANSWER})
def job_spec(record: VisibleJob, box: Box, form: CodeForm | None = None) -> Response:
    """The job as it is posted once more; with `form`, code that does so."""
    spec = box.records.spec(record.id)
    if spec is None:
        raise JobNotFound(f"job {record.id} was removed while it was asked for")
    again = posted_again(spec, model_version=record.model_version)
    if form is None:
        return Response(again.model_dump_json(), media_type="application/json")
    return Response(code_of(again, form, job=record.id), media_type="text/plain")


@router.delete("/{job_id}", status_code=202)
def cancel_job(record: VisibleJob, box: Box) -> JobView:
    """Cancel a job: at once if it waits, within a shard if it runs. One that has ended stays so."""
    box.records.update(record.id, partial(JobRecord.request_cancel, now_s=time.time()))
    return (box.records.get(record.id) or record).view()


async def answer_about(
    record: JobRecord,
    request: Request,
    credentials: Credentials,
    *,
    caller: TokenInfo,
    posted: bool = False,
) -> Response:
    """Return the answer about a job once the wait is over that its caller prefers.

    Args:
        posted: see `answer_with`.

    Raises:
        Unauthorized: the token or session ended meanwhile.
    """
    box: Backing = request.app.state.backing
    listener = Listener(request, box=box, credentials=credentials)
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
