"""A job's events as they happen, as server-sent events."""

from __future__ import annotations

from collections.abc import AsyncIterable
from typing import Annotated

from fastapi import APIRouter, Depends, Header, Request
from fastapi.sse import EventSourceResponse, ServerSentEvent

from gradbox_service.http.auth import Box, Credentials, Listener, VisibleJob
from gradbox_service.http.event_hub import Hub
from gradbox_service.http.open_requests import stream

router = APIRouter(prefix="/v1/jobs", tags=["jobs"])


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
