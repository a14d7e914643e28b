"""`Prefer: wait=N` (RFC 7240): an answer about a job that waits for the job's end.

Where the job ends in time and the caller takes `JOB_AND_RESULT`, the answer holds a small result
too. Its body is the length of the job's JSON (8 bytes, little-endian), that JSON, and then the
result file, whose digest the JSON states.
"""

from __future__ import annotations

import asyncio
import re
from typing import Final, NamedTuple

from fastapi import Request, Response

from gradbox.protocol import JOB_AND_RESULT, JobView, joined_with_result
from gradbox_service.backing import Backing
from gradbox_service.http.allowances import OpenRequests
from gradbox_service.http.event_hub import Hub, Wants
from gradbox_service.jobs import JobRecord
from gradbox_service.settings import MIB

# Longer waits would hold connections for little: the events are there for them.
MAX_WAIT_S: Final = 30
SMALL_RESULT_BYTES: Final = MIB
_WAIT: Final = re.compile(r"wait\s*=\s*\"?(\d{1,9})\"?", re.IGNORECASE)


class Waited(NamedTuple):
    """A job's record after the wait that its caller preferred."""

    record: JobRecord
    wait_s: int | None  # None where nothing was waited for
    result: bytes | None = None  # where it was read already


async def waited_for(record: JobRecord, request: Request, *, listener: str) -> Waited:
    """Return the job's record at its end, or as it is once the caller's wait is over.

    Whoever has as many waits and event streams open as may be is answered at once.
    """
    hub: Hub = request.app.state.hub
    streams: OpenRequests = request.app.state.streams
    wait_s = _preferred_wait_s(request)
    if not wait_s or streams.full(listener):
        return Waited(record, None)
    wants = None
    if _takes_result(request):
        wants = Wants.OWNER if record.owner == listener else Wants.SOMEBODY_ELSE
    result = None
    if not record.state.final:
        gone = asyncio.ensure_future(_disconnected(request))
        try:
            with streams.one_more(listener):
                record, result = await hub.ended(record, within_s=wait_s, gone=gone, wants=wants)
        finally:
            gone.cancel()
    return Waited(record, wait_s, result)


def is_answered_at_once(waited: Waited, request: Request) -> bool:
    """Return whether nothing is left to be read for the answer."""
    ended = waited.record.state.final
    return ended and (waited.result is not None or not _takes_result(request))


def _takes_result(request: Request) -> bool:
    return JOB_AND_RESULT in request.headers.get("accept", "")


def answer_with(
    waited: Waited,
    view: JobView,
    request: Request,
    *,
    box: Backing,
    caller: str,
    posted: bool = False,
) -> Response:
    """Return the answer about a job, with its result where that is small and the caller takes it.

    Args:
        posted: whether the request posted the job: then the status is 202 unless it was waited
            for and has ended.
    """
    record, wait_s, result = waited
    headers = {"Vary": "Accept, Prefer"}
    if wait_s is not None:
        headers["Preference-Applied"] = f"wait={wait_s}"
        if result is None and _takes_result(request):
            result = _small_result(record, box, caller=caller)
    has_ended = wait_s is not None and record.state.final
    return Response(
        view.model_dump_json() if result is None else joined_with_result(view, result),
        status_code=202 if posted and not has_ended else 200,
        headers=headers,
        media_type="application/json" if result is None else JOB_AND_RESULT,
    )


def _preferred_wait_s(request: Request) -> int | None:
    """Return the seconds that the caller would wait; None where it does not say."""
    preferences = ",".join(request.headers.getlist("prefer"))
    found = [_WAIT.fullmatch(one.strip()) for one in re.split("[,;]", preferences)]
    waits = [int(match[1]) for match in found if match is not None]
    return min(waits[0], MAX_WAIT_S) if waits else None


async def _disconnected(request: Request) -> None:
    """Wait until the client has closed its connection; its body was read before."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _small_result(record: JobRecord, box: Backing, *, caller: str) -> bytes | None:
    """Return the result file; None where there is none, or a larger one."""
    if record.result is None or record.result_gone_s is not None:
        return None
    if record.result.size_bytes > SMALL_RESULT_BYTES:
        return None
    is_owner = caller == record.owner
    try:
        with box.results.open(record.id, attempt=record.attempt) as file:
            content = file.read()
    except FileNotFoundError:
        return None  # the record will say so, to who asks for the result
    if is_owner:
        box.results.note_fetched(record.id, attempt=record.attempt)
    return content
