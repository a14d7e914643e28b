"""The whole box: what runs and waits, its devices and models, who used how much; pause, drain."""

from __future__ import annotations

import time
from collections.abc import AsyncIterable

from fastapi import Depends, Request
from fastapi.sse import EventSourceResponse, ServerSentEvent

from gradbox.errors import OwnerOnly
from gradbox.protocol import BoxView, OperationOrder, OperationView, Period, UsageView
from gradbox_service.dashboard.board import Board
from gradbox_service.dashboard.history import usage_seen_by
from gradbox_service.dashboard.picture import seen_by
from gradbox_service.http.allowances import stream
from gradbox_service.http.auth import Box, Caller, Credentials, Listener
from gradbox_service.http.routes import Router

router = Router(prefix="/v1", tags=["box"])


@router.get("/box")
async def one_box(request: Request, caller: Caller) -> BoxView:
    """The box now. Names and ids of jobs are there for their owner and the box's owner."""
    board: Board = request.app.state.board
    return seen_by(await board.now(), caller)


@router.get(
    "/box/events",
    response_class=EventSourceResponse,
    dependencies=[Depends(stream)],
)
async def box_events(
    request: Request, caller: Caller, box: Box, credentials: Credentials
) -> AsyncIterable[ServerSentEvent]:
    """A `box` event, whose data is what `GET /v1/box` gives, now and whenever something changed.

    The stream ends when the caller's token is revoked, and when the session is over that it was
    opened with.
    """
    board: Board = request.app.state.board
    listener = Listener(request, box=box, credentials=credentials)
    async for picture in board.pictures():
        if not await listener.is_known():
            return
        yield ServerSentEvent(raw_data=seen_by(picture, caller).model_dump_json(), event="box")


@router.get("/usage")
def usage(box: Box, caller: Caller, span: Period = "day") -> UsageView:
    """Use by owner over a span of time: everybody's for the box's owner.

    Others see their own, and the sum of all the rest as that of owner null.
    """
    return usage_seen_by(caller, box, span)


@router.get("/operation")
def operation(box: Box, caller: Caller) -> OperationView:
    """What the box's owner said last: running, paused or draining."""
    return box.operation.read()


@router.put("/operation")
def set_operation(order: OperationOrder, box: Box, caller: Caller) -> OperationView:
    """Pause, resume or drain the box; for its owner alone. Jobs that run go on in each case."""
    if not caller.admin:
        raise OwnerOnly(
            "only the box's owner may pause, resume or drain it: use the token that `gradbox up` "
            "wrote"
        )
    set_now = OperationView(
        mode=order.mode, reason=order.reason, by=caller.name, since_s=time.time()
    )
    box.operation.set(set_now)
    box.records.wake()  # so that the dispatcher looks at once
    return set_now
