"""Result files: whole, or a range of bytes, so that a client can read one tensor of many."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from email.utils import formatdate
from functools import partial
from typing import Any, BinaryIO

from fastapi import APIRouter, Request, Response
from fastapi.responses import FileResponse
from starlette.types import Message, Receive, Scope, Send

from gradbox.errors import BlobRejected, ResultGone, ResultNotReady
from gradbox.protocol import JobState, Receipt, ResultView
from gradbox.tensors.checksums import read_checked_header
from gradbox_service.http.auth import Box, Caller, VisibleJob
from gradbox_service.http.openapi import RESULT_ANSWERS, RESULT_REQUEST
from gradbox_service.http.problems import plain_problem, problem_response
from gradbox_service.jobs import JobRecord
from gradbox_service.settings import MIB

router = APIRouter(prefix="/v1/jobs", tags=["jobs"])

# As many digits as `int` reads, and more than any file has.
_RANGE = re.compile(r"\s*(?:([0-9]{1,1000})\s*-\s*([0-9]{0,1000})|-\s*([0-9]{1,1000}))\s*")


class ResultResponse(FileResponse):
    """Sends a file that is open: it may be removed before its last byte is sent, or its first.

    `whole` sends all of it, whatever `Range` says. `fetched` is called once all of it was sent
    to a client that was there to the last.
    """

    chunk_size = MIB

    def __init__(
        self, file: BinaryIO, *, whole: bool, fetched: Callable[[], None], **given: Any
    ) -> None:
        super().__init__(f"/dev/fd/{file.fileno()}", **given)
        self._file = file
        self._fetched = fetched
        self.whole = whole

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self.whole:
            kept = [(name, value) for name, value in scope["headers"] if name != b"range"]
            scope = {**scope, "headers": kept}
        request = Request(scope, receive)
        status = None

        async def noting(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            is_last = message["type"] == "http.response.body" and not message.get("more_body")
            is_there = is_last and not await request.is_disconnected()
            await send(message)
            if is_there and status == 200 and request.method == "GET":
                self._fetched()

        with self._file:
            await super().__call__(scope, receive, noting)


@router.head("/{job_id}/result", response_class=Response, include_in_schema=False)
@router.get(
    "/{job_id}/result",
    response_class=Response,
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
    path = box.results.path(record.id, attempt=record.attempt)
    box.results.touch(record.id, attempt=record.attempt)
    try:
        file = path.open("rb")
    except FileNotFoundError:
        raise ResultGone(_gone(record)) from None
    found = os.fstat(file.fileno())
    if found.st_size != result.size_bytes:
        raise ResultGone(
            f"the result of job {record.id} has {found.st_size} of its {result.size_bytes} bytes "
            f"left, as after a power cut; submit the job again"
        )
    if box.results.is_spoilt(record.id, attempt=record.attempt):
        raise ResultGone(_damaged(record))
    # HEAD knows no ranges, and a unit that is not ours is none of them (RFC 9110, section 14.2).
    wanted = request.headers.get("range", "")
    in_bytes = wanted.partition("=")[0].strip().lower() == "bytes"

    def fetched() -> None:
        if caller.name == record.owner:
            box.results.note_fetched(record.id, attempt=record.attempt)

    response = ResultResponse(
        file,
        whole=request.method == "HEAD" or not in_bytes,
        fetched=fetched,
        headers=headers,
        media_type="application/octet-stream",
        filename=f"{record.id}.safetensors",
        stat_result=found,
    )
    of_this_file = (etag, response.headers["last-modified"])
    if response.whole or request.headers.get("if-range", etag) not in of_this_file:
        return response
    return _refused_range(wanted, request, size_bytes=found.st_size) or response


@router.get("/{job_id}/receipt")
def job_receipt(record: VisibleJob, box: Box) -> Receipt:
    """The receipt of a job that is done, as its result file has it."""
    _result_of(record)
    try:
        header = read_checked_header(box.results.path(record.id, attempt=record.attempt))
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


def _refused_range(wanted: str, request: Request, *, size_bytes: int) -> Response | None:
    """Return the refusal of a Range that cannot be served, so that it too is problem+json."""
    found = [_RANGE.fullmatch(span) for span in wanted.partition("=")[2].split(",")]
    if None in found:
        detail = f"expected a Range like bytes=0-99, bytes=100- or bytes=-100, got {wanted[:80]!r}"
        return problem_response(plain_problem(400, "bad-range", detail), request)
    bounds = [_bounds(span, size_bytes) for span in found if span is not None]
    if all(0 <= begin < size_bytes and begin <= end for begin, end in bounds):
        return None
    problem = plain_problem(
        416, "bad-range", f"the result has {size_bytes} bytes, got the Range {wanted[:80]!r}"
    )
    return problem_response(problem, request, {"Content-Range": f"bytes */{size_bytes}"})


def _bounds(span: re.Match[str], size_bytes: int) -> tuple[int, int]:
    begin, end, suffix = span.groups()
    if suffix is not None:
        return (max(0, size_bytes - int(suffix)) if int(suffix) else size_bytes, size_bytes)
    return (int(begin), int(end) if end else size_bytes)
