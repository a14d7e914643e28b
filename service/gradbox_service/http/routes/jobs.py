"""Jobs: post, list, look at, cancel."""

from __future__ import annotations

import heapq
import time
from functools import partial
from itertools import islice
from typing import Annotated

from fastapi import APIRouter, Header, Query, Request

from gradbox.errors import OwnerOnly
from gradbox.protocol import JobList, JobState, JobView, OperationMode
from gradbox_service.admission import post
from gradbox_service.backing import Backing
from gradbox_service.http.auth import Box, Caller, VisibleJob
from gradbox_service.http.bodies import Bodies
from gradbox_service.http.openapi import JOB_BODY
from gradbox_service.jobs import JobRecord

router = APIRouter(prefix="/v1/jobs", tags=["jobs"])

IdempotencyKey = Annotated[
    str | None, Header(min_length=1, max_length=200, description="Makes posting repeatable")
]
MAX_LISTED = 500


@router.post("", status_code=202, openapi_extra=JOB_BODY)
async def post_job(
    request: Request, box: Box, caller: Caller, idempotency_key: IdempotencyKey = None
) -> JobView:
    """Accept a job. It then ends in exactly one of done, failed, cancelled."""
    bodies: Bodies = request.app.state.bodies
    record = await bodies.handle(
        request,
        partial(
            post,
            caller=caller,
            idempotency_key=idempotency_key,
            box=box,
            settings=request.app.state.settings,
        ),
    )
    return _view(record, box)


@router.get("")
def list_jobs(
    box: Box,
    caller: Caller,
    state: JobState | None = None,
    limit: Annotated[int, Query(ge=1, le=MAX_LISTED)] = 100,
    everybodys: Annotated[
        bool, Query(alias="all", description="Everybody's; for the box's owner alone")
    ] = False,
) -> JobList:
    """The caller's jobs, newest first."""
    if everybodys and not caller.admin:
        raise OwnerOnly(
            "all=true lists everybody's jobs, which only the box's owner may: leave it out, or use "
            "the token that `gradbox up` wrote"
        )
    owners = box.records.owners() if everybodys else [caller.name]
    found = [box.records.owned(owner, state=state, limit=limit) for owner in owners]
    newest_first = heapq.merge(*found, key=lambda record: record.created_s, reverse=True)
    positions, hold = box.records.positions(), _hold(box)
    return JobList(
        jobs=[
            _held(r.view(queue_position=positions.get(r.id)), hold)
            for r in islice(newest_first, limit)
        ]
    )


@router.get("/{job_id}")
def one_job(record: VisibleJob, box: Box) -> JobView:
    """One job."""
    return _view(record, box)


@router.delete("/{job_id}", status_code=202)
def cancel_job(record: VisibleJob, box: Box) -> JobView:
    """Cancel a job: at once if it waits, within a shard if it runs. One that has ended stays so."""
    box.records.update(record.id, partial(JobRecord.request_cancel, now_s=time.time()))
    return (box.records.get(record.id) or record).view()


def _view(record: JobRecord, box: Backing) -> JobView:
    position = box.records.positions().get(record.id)
    return _held(record.view(queue_position=position), _hold(box))


def _hold(box: Backing) -> str | None:
    """Say why no job is handed to a worker; None if jobs are."""
    operation = box.operation.read()
    return None if operation.mode is OperationMode.RUNNING else str(operation)


def _held(view: JobView, hold: str | None) -> JobView:
    waits = hold is not None and view.state is JobState.QUEUED
    return view.model_copy(update={"hold": hold}) if waits else view
