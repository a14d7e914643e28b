"""Bodies that are read whole: posted jobs.

A body is gathered in a file once it is large, so that many slow ones take no memory, and large ones
are checked one after the other: what a check holds at once is that of one body.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from tempfile import SpooledTemporaryFile
from typing import TypeVar

import anyio.to_thread
from anyio import CapacityLimiter
from fastapi import Request

from gradbox.errors import BlobTooLarge
from gradbox_service.settings import KIB

LARGE_BYTES = 256 * KIB

Made = TypeVar("Made")


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
