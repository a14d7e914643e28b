"""Bodies of requests that are read whole: posted jobs, and the few values of any other call.

A job's body is gathered in a file once it is large, so that many slow ones take no memory, and
large ones are checked one after the other: what a check holds at once is that of one body. It may
have several parts: a job and the small blobs that it names, in one request. The form is that of
multipart/form-data (RFC 7578), which `curl -F` sends. The part named `job` is what `POST /v1/jobs`
takes alone; every other part is a blob, named by its digest.

Any other body is small (`small_body`): FastAPI parses it before it looks at who sends it. Where a
route takes none, the server drops it unread.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import SpooledTemporaryFile
from typing import Final, TypeVar

import anyio.to_thread
from anyio import CapacityLimiter
from fastapi import Request
from python_multipart import FormParser
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import Field, File, parse_options_header

from gradbox.errors import BlobTooLarge, InvalidJob
from gradbox_service.settings import KIB, MIB

LARGE_BYTES = 256 * KIB

Made = TypeVar("Made")
FORM: Final = "multipart/form-data"
JOB: Final = "job"
# A job and its blobs, with what is between them.
MAX_BODY_BYTES: Final = MIB
# The parser has a limit of its own for each header: this one bounds what a body makes us keep.
MAX_PARTS: Final = 257
DIGEST: Final = re.compile(r"[0-9a-f]{64}")
EXPECTED: Final = (
    f"a {FORM} body: expected one part named {JOB!r} and others named by the SHA-256 of the blob "
    "that they are, as docs/wire.md has it"
)
SMALL_BYTES: Final = 4 * KIB


class Bodies:
    """Reads bodies of at most `limit_bytes`; what is large waits under `folder`, without a name."""

    def __init__(self, *, folder: Path, limit_bytes: int) -> None:
        self._folder = folder
        self._limit_bytes = limit_bytes
        self._one_at_a_time = CapacityLimiter(1)

    def check_job(self, job: bytes) -> None:
        """Check a job that came with blobs in one body.

        Raises:
            BlobTooLarge: it has more bytes than a job alone may.
        """
        if len(job) > self._limit_bytes:
            raise _too_large(self._limit_bytes)

    async def handle(
        self,
        request: Request,
        function: Callable[[bytes], Made],
        *,
        limit_bytes: int | None = None,
    ) -> Made:
        """Read the request's body and return what `function` makes of it, in a thread.

        Args:
            limit_bytes: what it may have at most, if not as many as a job alone.

        Raises:
            BlobTooLarge: it has more bytes, or says that it will.
            OSError: there was no room to gather it.
        """
        limit_bytes = self._limit_bytes if limit_bytes is None else limit_bytes
        if announced_bytes(request) > limit_bytes:
            raise _too_large(limit_bytes)
        with SpooledTemporaryFile(max_size=LARGE_BYTES, dir=str(self._folder)) as gathered:
            size_bytes = 0
            async for chunk in request.stream():
                size_bytes += len(chunk)
                if size_bytes > limit_bytes:
                    raise _too_large(limit_bytes)
                gathered.write(chunk)

            def run() -> Made:
                gathered.seek(0)
                return function(gathered.read())

            limiter = self._one_at_a_time if size_bytes > LARGE_BYTES else None
            return await anyio.to_thread.run_sync(run, limiter=limiter)


def _too_large(limit_bytes: int) -> BlobTooLarge:
    return BlobTooLarge(
        f"a posted job, with the blobs in its body, has at most {limit_bytes} bytes here: upload "
        "blobs with PUT /v1/blobs/{sha256}, and put more samples into each shard"
    )


def announced_bytes(request: Request) -> int:
    """Return the Content-Length; 0 for a body that comes in chunks."""
    length = request.headers.get("content-length", "")
    return int(length) if length.isascii() and length.isdigit() else 0


@dataclass(frozen=True)
class Parts:
    """A posted job, and the blobs that came with it by their digests, which nobody has verified."""

    job: bytes
    blobs: Mapping[str, bytes]


def is_form(content_type: str) -> bool:
    """Return whether a body has several parts, by its Content-Type."""
    return content_type.partition(";")[0].strip().lower() == FORM


def read_parts(body: bytes, *, content_type: str) -> Parts:
    """Read a body that is whole.

    Raises:
        InvalidJob: it is not of the form that is expected.
    """
    _, options = parse_options_header(content_type)
    boundary = options.get(b"boundary", b"")
    if not boundary:
        raise InvalidJob(f"{EXPECTED}; got a Content-Type without a boundary")
    parts: dict[str, bytes] = {}
    ended = False

    def on_part(part: Field | File) -> None:
        name = (part.field_name or b"").decode("latin-1")
        if name != JOB and not DIGEST.fullmatch(name):
            raise InvalidJob(f"{EXPECTED}; got a part named {name[:80]!r}")
        if name in parts:
            raise InvalidJob(f"{EXPECTED}; got two parts named {name!r}")
        if len(parts) >= MAX_PARTS:
            raise InvalidJob(
                f"{EXPECTED}; got more than {MAX_PARTS} parts: upload blobs with PUT "
                "/v1/blobs/{sha256}"
            )
        parts[name] = _content(part)

    def on_end() -> None:
        nonlocal ended
        ended = True

    try:
        parser = FormParser(FORM, on_part, on_part, on_end, boundary=boundary)
        parser.write(body)
        parser.finalize()
    except FormParserError as error:
        raise InvalidJob(f"{EXPECTED}; got one that cannot be parsed: {error}") from None
    if not ended:
        raise InvalidJob(f"{EXPECTED}; got one without its closing boundary")
    if JOB not in parts:
        raise InvalidJob(f"{EXPECTED}; got no part named {JOB!r}")
    return Parts(parts.pop(JOB), parts)


def _content(part: Field | File) -> bytes:
    """Return what a part holds; it has a file name where `curl -F` takes it from a file."""
    if isinstance(part, Field):
        return part.value or b""
    part.file_object.seek(0)
    return part.file_object.read()


async def small_body(request: Request) -> bytes:
    """Return the body of a request that FastAPI is to parse.

    Raises:
        BlobTooLarge: it has more than `SMALL_BYTES`, or says that it will.
    """
    received = bytearray()
    is_small = announced_bytes(request) <= SMALL_BYTES
    if is_small:
        async for chunk in request.stream():
            received += chunk
            is_small = len(received) <= SMALL_BYTES
            if not is_small:
                break
    if not is_small:
        raise BlobTooLarge(
            f"expected a body of at most {SMALL_BYTES} bytes for {request.method} "
            f"{request.url.path}, got more; jobs go to POST /v1/jobs, tensors to PUT "
            "/v1/blobs/{sha256}"
        )
    return bytes(received)
