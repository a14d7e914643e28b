"""Fetching a result file: hashed as it is streamed to disk, resumed where a connection broke."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from io import BufferedRandom
from pathlib import Path
from typing import Final

import httpcore
import httpx

from gradbox.errors import (
    GradboxError,
    JobCancelled,
    JobFailed,
    ProtocolError,
    ResultGone,
    ResultNotReady,
)
from gradbox.http.connection import Connection, TransientFault
from gradbox.protocol import JobState, JobView, ResultView

HASHED_BYTES: Final = 2**20  # at a time
READ_BYTES: Final = 2**20  # at most at a time
# What is left of a body is worth another connection afterwards.
LONG_BYTES: Final = 16 * 2**20
CONTENT_RANGE: Final = re.compile(r"bytes (\d+)-\d+/\d+")

OnBytes = Callable[[int, int], None]


def download(
    connection: Connection,
    url_path: str,
    into: Path,
    *,
    expected: ResultView,
    on_bytes: OnBytes | None = None,
) -> None:
    """Fetch the file that `expected` describes.

    It is written beside `into`, under a name with its digest in it, and renamed to `into` when it
    is whole and has that digest. A part that an earlier call left is continued.

    Args:
        on_bytes: called with the bytes that are there and the bytes that there will be.

    Raises:
        ProtocolError: the bytes received do not have the announced digest.
        ServiceUnavailable: the box stayed out of reach for longer than the connection's patience.
    """
    part = part_of(into, expected)
    descriptor = os.open(part, os.O_RDWR | os.O_CREAT, 0o600)
    with os.fdopen(descriptor, "r+b") as file, HashedFile(file) as hashed:
        backoff = connection.backoff()
        while (have := hashed.size_bytes) != expected.size_bytes:
            if have > expected.size_bytes:
                hashed.empty()
                continue
            try:
                _append(connection, url_path, hashed, expected, on_bytes)
            except TransientFault as fault:
                if hashed.size_bytes > have:
                    backoff.reset()
                backoff.pause(fault)
        found = hashed.hexdigest()
    if found != expected.sha256:
        part.unlink()
        raise _wrong_digest(found, expected)
    os.replace(part, into)


def verify(content: memoryview, *, expected: ResultView) -> None:
    """Check a whole file that has come already.

    Raises:
        ProtocolError: its digest is not the right one.
    """
    found = hashlib.sha256(content).hexdigest()
    if found != expected.sha256:
        raise _wrong_digest(found, expected)


def part_of(into: Path, expected: ResultView) -> Path:
    """Return where the file is while it is not whole: beside `into`, and of no other result."""
    return into.with_name(f"{into.name}.{expected.sha256[:16]}.part")


class HashedFile:
    """A file that is written from its beginning on and hashed beside it, in a thread of its own."""

    def __init__(self, file: BufferedRandom) -> None:
        """Hash what an earlier call left in the file."""
        self._file = file
        self._digest = hashlib.file_digest(file, "sha256")
        self.size_bytes = file.tell()
        self._thread = ThreadPoolExecutor(1, "digest")
        self._hashed: Future[None] | None = None
        self._unhashed: list[bytes] = []
        self._num_unhashed_bytes = 0

    def __enter__(self) -> HashedFile:
        return self

    def __exit__(self, *error: object) -> None:
        self._thread.shutdown()

    def append(self, chunk: bytes) -> None:
        """Write a chunk; it is hashed while the next ones are received."""
        self._file.write(chunk)
        self.size_bytes += len(chunk)
        self._unhashed.append(chunk)
        self._num_unhashed_bytes += len(chunk)
        if self._num_unhashed_bytes >= HASHED_BYTES:
            self._hash()

    def empty(self) -> None:
        """Begin anew."""
        if not self.size_bytes:
            return  # truncated, even at 0 bytes, ext4 writes a file out before it is closed
        self._wait()
        self._unhashed, self._num_unhashed_bytes = [], 0
        self._file.seek(0)
        self._file.truncate()
        self._digest = hashlib.sha256()
        self.size_bytes = 0

    def hexdigest(self) -> str:
        """Return the SHA-256 of all that the file has."""
        self._hash()
        self._wait()
        return self._digest.hexdigest()

    def _hash(self) -> None:
        self._wait()
        self._hashed = self._thread.submit(self._digest.update, b"".join(self._unhashed))
        self._unhashed, self._num_unhashed_bytes = [], 0

    def _wait(self) -> None:
        if self._hashed is not None:
            self._hashed.result()


def _append(
    connection: Connection,
    url_path: str,
    file: HashedFile,
    expected: ResultView,
    on_bytes: OnBytes | None,
) -> None:
    """Ask for what is missing of `file` and write each chunk as it is received."""
    have = file.size_bytes
    # The bytes as they are stored: a range counts them, and so does the digest.
    headers = {"Accept-Encoding": "identity"}
    if have:
        # Should the file be another one by now, all of it comes, with status 200.
        headers |= {"Range": f"bytes={have}-", "If-Range": f'"{expected.sha256}"'}
    with connection.stream("GET", url_path, headers=headers) as answer:
        if have and answer.status_code == httpx.codes.PARTIAL_CONTENT:
            _check_range(answer, have)
        else:
            file.empty()
        for chunk in _chunks(answer):
            file.append(chunk)
            if on_bytes is not None:
                on_bytes(file.size_bytes, expected.size_bytes)
    if file.size_bytes != expected.size_bytes:
        raise TransientFault(
            f"expected {expected.size_bytes} bytes from {connection.url}{url_path}, "
            f"got {file.size_bytes} before the connection ended"
        )


def _chunks(answer: httpx.Response) -> Iterator[bytes]:
    """Give the body of an answer as it is received.

    httpx reads 64 KiB at a time and copies them three times, which takes as long as all else that
    a download does. Each chunk that it gives is all that it has read. So a long body's rest is read
    from the connection below httpx, which closes it afterwards.

    Raises:
        httpx.TransportError: the connection broke.
    """
    chunks = answer.iter_bytes()
    left = _plain_bytes(answer)
    for chunk in chunks:
        yield chunk
        left -= len(chunk)
        if left >= LONG_BYTES:
            break
    while left > 0 and (chunk := _read(answer, min(left, READ_BYTES))):
        yield chunk
        left -= len(chunk)


def _read(answer: httpx.Response, most: int) -> bytes:
    """Read from the connection of an answer; b"" where it has ended."""
    connection: httpcore.NetworkStream = answer.extensions["network_stream"]
    timeout_s: float = answer.request.extensions["timeout"]["read"]
    try:
        return connection.read(most, timeout=timeout_s)
    except (httpcore.NetworkError, httpcore.TimeoutException) as error:
        raise httpx.ReadError(f"{type(error).__name__} {error}") from error


def _plain_bytes(answer: httpx.Response) -> int:
    """Return how many bytes the body has on the connection itself; 0 if it comes otherwise.

    Over TLS it does, 16 KiB at a time whoever reads.
    """
    is_plain = answer.http_version == "HTTP/1.1" and answer.request.url.scheme == "http"
    is_coded = {"transfer-encoding", "content-encoding"} & answer.headers.keys()
    if not is_plain or is_coded or "network_stream" not in answer.extensions:
        return 0
    return int(answer.headers.get("content-length", 0))


def _wrong_digest(found: str, expected: ResultView) -> ProtocolError:
    return ProtocolError(
        f"expected the result to have SHA-256 {expected.sha256}, got {found}; fetch it again, "
        f"and if that fails too, the box's disk has damaged it: submit the job again, and tell the "
        f"box's owner"
    )


def _check_range(answer: httpx.Response, have: int) -> None:
    given = answer.headers.get("content-range", "")
    found = CONTENT_RANGE.fullmatch(given)
    if found is None or int(found[1]) != have:
        raise ProtocolError(f"expected the bytes from {have} on, got Content-Range {given!r}")


def why_no_result(view: JobView, *, url: str) -> GradboxError:
    """Return the error that says why a job has no result to be fetched."""
    if view.state is JobState.CANCELLED:
        return JobCancelled(f"job {view.id} was cancelled; submit it again to have its result")
    if view.error is not None:
        error = view.error.job_failure()
        error.add_note(f"job {view.id} at {url}")
        return error
    if view.state is JobState.DONE:
        return ResultGone(
            f"the result of job {view.id} is no longer on the box: it was deleted or has "
            f"expired; submit the job again to have it"
        )
    if view.state.final:
        return JobFailed(f"job {view.id} ended as {view.state.value} and the box says no more")
    return ResultNotReady(
        f"job {view.id} is {view.state.value}: wait for it with job.wait() or job.result()"
    )
