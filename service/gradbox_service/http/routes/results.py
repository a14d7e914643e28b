"""Result files: whole, or a range of bytes, so that a client can read one tensor of many."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from email.utils import formatdate
from functools import partial
from typing import Any, BinaryIO, Final

from fastapi import Depends, Request, Response
from fastapi.responses import StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from gradbox.errors import BlobRejected, ResultGone, ResultNotReady
from gradbox.protocol import JobState, Receipt, ResultView
from gradbox.tensors.checksums import checked_header
from gradbox_service.backing import Backing
from gradbox_service.http.allowances import transfer
from gradbox_service.http.auth import Box, Caller, VisibleJob
from gradbox_service.http.openapi import RESULT_ANSWERS, RESULT_REQUEST
from gradbox_service.http.problems import plain_problem, problem_response
from gradbox_service.http.routes import Router
from gradbox_service.jobs import JobRecord
from gradbox_service.settings import MIB

router = Router(prefix="/v1/jobs", tags=["jobs"])

# Reading a piece takes a thread: of 64 KiB each a download would take twice as long. Of a MiB each,
# a user's downloads that nobody reads would hold 200 MB.
PIECE_BYTES: Final = MIB // 4
# As many digits as `int` reads, and more than any file has.
_RANGE = re.compile(r"\s*(?:([0-9]{1,1000})\s*-\s*([0-9]{0,1000})|-\s*([0-9]{1,1000}))\s*")


class ResultResponse(StreamingResponse):
    """Sends a part of a file that is open: it may be removed before its last byte is sent.

    What a client does not take stays in the file: two pieces wait in memory, and no more is read.
    `sent` is called once all of it was sent to a client that was there to the last.
    """

    def __init__(
        self,
        file: BinaryIO,
        begin: int,
        end: int,
        *,
        sent: Callable[[], None] = lambda: None,
        **given: Any,
    ) -> None:
        super().__init__(_pieces(file, begin, end), **given)
        self._file, self._sent = file, sent

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)

        async def noting(message: Message) -> None:
            is_last = message["type"] == "http.response.body" and not message.get("more_body")
            is_there = is_last and not await request.is_disconnected()
            await send(message)
            if is_there:
                self._sent()

        with self._file:
            await super().__call__(scope, receive, noting)


def _pieces(file: BinaryIO, begin: int, end: int) -> Iterator[bytes]:
    """Yield these bytes of a file, which a thread reads."""
    file.seek(begin)
    # It ends early where the file was cut short: the connection breaks, and the client hears of it.
    while begin < end and (piece := file.read(min(PIECE_BYTES, end - begin))):
        begin += len(piece)
        yield piece


@router.head("/{job_id}/result", response_class=Response, include_in_schema=False)
@router.get(
    "/{job_id}/result",
    response_class=Response,
    dependencies=[Depends(transfer)],
    responses=RESULT_ANSWERS,
    openapi_extra=RESULT_REQUEST,
)
def job_result(request: Request, record: VisibleJob, box: Box, caller: Caller) -> Response:
    """The safetensors file of a job that is done; `Range`, `If-Range` and `If-None-Match` work."""
    result = _result_of(record)
    etag = f'"{result.sha256}"'
    # A proxy that compressed the bytes would weaken the ETag, and ranges would count others.
    cached = "private, immutable, no-transform, max-age=31536000"
    headers = {"ETag": etag, "Cache-Control": cached}
    if record.finished_s is not None:  # the file's own time says when it was last read
        headers["Last-Modified"] = formatdate(record.finished_s, usegmt=True)
    if _matches(request.headers.get("if-none-match", ""), etag):
        return Response(status_code=304, headers=headers)
    byte_range = _wanted_range(request, result.size_bytes, headers)
    if isinstance(byte_range, Response):
        return byte_range
    file = _opened(record, result, box)
    begin, end = byte_range or (0, result.size_bytes)
    headers |= {
        "Accept-Ranges": "bytes",
        "Content-Disposition": f'attachment; filename="{record.id}.safetensors"',
        "Content-Length": str(end - begin),
        "Content-Type": "application/octet-stream",
    }
    if request.method == "HEAD":
        file.close()
        return Response(headers=headers)
    if byte_range is None:
        note = partial(box.results.note_fetched, record.id, attempt=record.attempt)
        of_owner = {"sent": note} if caller.name == record.owner else {}
        return ResultResponse(file, begin, end, headers=headers, **of_owner)
    headers["Content-Range"] = f"bytes {begin}-{end - 1}/{result.size_bytes}"
    return ResultResponse(file, begin, end, headers=headers, status_code=206)


@router.get("/{job_id}/receipt")
def job_receipt(record: VisibleJob, box: Box) -> Receipt:
    """The receipt of a job that is done, as its result file has it."""
    _result_of(record)
    try:
        with box.results.open(record.id, attempt=record.attempt) as file:
            header = checked_header(file)
    except FileNotFoundError:
        raise ResultGone(_gone(record)) from None
    except BlobRejected:
        raise ResultGone(_damaged(record)) from None
    return Receipt.model_validate_json(header.metadata["gradbox"])


@router.delete("/{job_id}/result", status_code=204)
def delete_result(record: VisibleJob, box: Box) -> None:
    """Delete the result of a job that has ended; nothing happens where there is none (any more)."""
    if not record.state.final:
        raise ResultNotReady(
            f"job {record.id} is {record.state}: cancel it first, or delete its result once it is "
            "done"
        )
    box.records.update(record.id, partial(JobRecord.drop_result, now_s=time.time()))
    box.results.discard(record.id, attempt=record.attempt)


def _result_of(record: JobRecord) -> ResultView:
    """Raises:
    ResultNotReady, ResultGone: the job has none (yet), or none any more.
    """
    if record.result is None:
        raise ResultNotReady(_why_not(record))
    if record.result_gone_s is not None:
        raise ResultGone(_gone(record))
    return record.result


def _opened(record: JobRecord, result: ResultView, box: Backing) -> BinaryIO:
    """Open a result's file, which is used now.

    Raises:
        ResultGone: it was removed, cut short or damaged.
    """
    try:
        file = box.results.open(record.id, attempt=record.attempt)
    except FileNotFoundError:
        raise ResultGone(_gone(record)) from None
    found_bytes = file.seek(0, os.SEEK_END)
    if found_bytes != result.size_bytes:
        file.close()
        raise ResultGone(
            f"the result of job {record.id} has {found_bytes} of its {result.size_bytes} bytes "
            f"left, as after a power cut; submit the job again"
        )
    return file


def _gone(record: JobRecord) -> str:
    return (
        f"the result of job {record.id} is no longer on the box: it was deleted, or not read for "
        "too long; submit the job again"
    )


def _damaged(record: JobRecord) -> str:
    return (
        f"the result of job {record.id} has other bytes than were written, as after a power cut or "
        f"on a failing disk; submit the job again"
    )


def _why_not(record: JobRecord) -> str:
    if record.state is JobState.FAILED and record.error is not None:
        return f"job {record.id} failed and has no result: {record.error.detail}"
    if record.state is JobState.CANCELLED:
        return f"job {record.id} was cancelled and has no result"
    return f"job {record.id} is {record.state}; its result is there once it is done"


def _matches(if_none_match: str, etag: str) -> bool:
    tags = [tag.strip().removeprefix("W/") for tag in if_none_match.split(",")]
    return etag in tags or tags == ["*"]


def _wanted_range(
    request: Request, size_bytes: int, headers: Mapping[str, str]
) -> tuple[int, int] | Response | None:
    """Return the one range of bytes that is wanted, or its refusal; None where all is to be sent.

    Args:
        headers: of the answer: `If-Range` names its ETag or its date.
    """
    wanted = request.headers.get("range", "")
    unit, _, ranges = wanted.partition("=")
    # HEAD knows no ranges, and a unit that is not ours is none of them (RFC 9110, section 14.2).
    if request.method == "HEAD" or unit.strip().lower() != "bytes":
        return None
    of_this_file = (headers["ETag"], headers.get("Last-Modified"))
    if request.headers.get("if-range", headers["ETag"]) not in of_this_file:
        return None
    if "," in ranges:
        return None  # several are more than anybody needs
    found = _RANGE.fullmatch(ranges)
    if found is None:
        detail = f"expected a Range like bytes=0-99, bytes=100- or bytes=-100, got {wanted[:80]!r}"
        return problem_response(plain_problem(400, "bad-range", detail), request)
    begin, end = _bounds(found, size_bytes)
    if begin < end:
        return begin, end
    problem = plain_problem(
        416, "bad-range", f"the result has {size_bytes} bytes, got the Range {wanted[:80]!r}"
    )
    return problem_response(problem, request, {"Content-Range": f"bytes */{size_bytes}"})


def _bounds(found: re.Match[str], size_bytes: int) -> tuple[int, int]:
    """Return the first byte and the one behind the last; they are none where there are none."""
    begin, end, suffix = found.groups()
    if suffix is not None:
        return max(0, size_bytes - int(suffix)), size_bytes
    return int(begin), min(int(end) + 1, size_bytes) if end else size_bytes
