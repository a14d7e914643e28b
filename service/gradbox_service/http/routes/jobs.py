"""Jobs: post, list, look at, cancel."""

from __future__ import annotations

import time
from functools import partial
from typing import Annotated

import anyio.to_thread
from fastapi import APIRouter, Header, Query, Request
from pydantic import BaseModel

from gradbox.errors import BlobTooLarge
from gradbox.protocol import JobState, JobView
from gradbox_service.http.auth import Box, Owner, VisibleJob
from gradbox_service.http.openapi import JOB_BODY
from gradbox_service.http.posting import post
from gradbox_service.jobs import JobRecord
from gradbox_service.settings import Settings

router = APIRouter(prefix="/v1/jobs", tags=["jobs"])

IdempotencyKey = Annotated[
    str | None, Header(min_length=1, max_length=200, description="Makes posting repeatable")
]
MAX_LISTED = 500


class JobList(BaseModel):
    jobs: list[JobView]


@router.post("", status_code=202, openapi_extra=JOB_BODY)
async def post_job(
    request: Request, box: Box, owner: Owner, idempotency_key: IdempotencyKey = None
) -> JobView:
    """Accept a job. It then ends in exactly one of done, failed, cancelled."""
    settings: Settings = request.app.state.settings
    body = await _body(request, limit_bytes=settings.max_spec_bytes)
    record = await anyio.to_thread.run_sync(
        partial(
            post,
            body,
            owner=owner,
            idempotency_key=idempotency_key,
            box=box,
            max_attempts=settings.max_attempts,
        )
    )
    return record.view()


@router.get("")
def list_jobs(
    box: Box,
    owner: Owner,
    state: JobState | None = None,
    limit: Annotated[int, Query(ge=1, le=MAX_LISTED)] = 100,
) -> JobList:
    """The caller's jobs, newest first."""
    positions = box.records.positions()
    records = box.records.owned(owner, state=state, limit=limit)
    return JobList(jobs=[r.view(queue_position=positions.get(r.id)) for r in records])


@router.get("/{job_id}")
def one_job(record: VisibleJob, box: Box) -> JobView:
    """One job."""
    return record.view(queue_position=box.records.positions().get(record.id))


@router.delete("/{job_id}", status_code=202)
def cancel_job(record: VisibleJob, box: Box) -> JobView:
    """Cancel a job: at once if it waits, within a shard if it runs. One that has ended stays so."""
    box.records.update(record.id, partial(JobRecord.request_cancel, now_s=time.time()))
    return (box.records.get(record.id) or record).view()


async def _body(request: Request, *, limit_bytes: int) -> bytes:
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > limit_bytes:
            raise BlobTooLarge(
                f"a posted job has at most {limit_bytes} bytes here: put tensors into blobs, and "
                "shards into fewer groups"
            )
    return bytes(body)
