"""Pause, resume and drain: whether jobs are handed to workers and new ones taken."""

from __future__ import annotations

import time

from fastapi import APIRouter

from gradbox.errors import OwnerOnly
from gradbox.protocol import OperationOrder, OperationView
from gradbox_service.http.auth import Box, Caller

router = APIRouter(prefix="/v1/operation", tags=["box"])


@router.get("")
def operation(box: Box, caller: Caller) -> OperationView:
    """What the box's owner said last: running, paused or draining."""
    return box.operation.read()


@router.put("")
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
