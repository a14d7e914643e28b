"""A job, the small blobs that it names, and its small result: each way in one body.

request     multipart/form-data: the part `job`, and a part for each blob, named by its digest
answer      the job; with `Prefer: wait` and where it has ended, its small result behind it
"""

from __future__ import annotations

import sys
import threading
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

import httpx

from gradbox.errors import MissingBlobs, ProtocolError
from gradbox.http.connection import Connection, parsed
from gradbox.http.download import OnBytes
from gradbox.http.upload import Uploader
from gradbox.protocol import JOB_AND_RESULT, JobView, split_result
from gradbox.tensors.blob import Blob

# What a box takes in one body, and what is kept free for the lines between the parts.
TOGETHER_BYTES: Final = 2**20
BESIDE_BYTES: Final = 256
MAX_BLOBS: Final = 256
ACCEPT: Final = f"{JOB_AND_RESULT}, application/json"


@dataclass(frozen=True)
class Answered:
    """What the box said of a job, and its result file where that came along."""

    view: JobView
    small: memoryview | None = None


def form_of(job: bytes, blobs: Sequence[Blob]) -> tuple[bytes, str]:
    """Return a job and blobs as one body, and its Content-Type."""
    parts = [("job", (None, job, "application/json"))]
    parts += [
        (blob.digest, (None, b"".join(blob.chunks()), "application/octet-stream")) for blob in blobs
    ]
    form = httpx.Request("POST", "http://box", files=parts)
    return form.read(), form.headers["Content-Type"]


class Poster:
    """Posts jobs to one box, and sends it what it lacks of their blobs. Any thread may call it."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._uploader = Uploader(connection)

    def send(
        self,
        job: bytes,
        blobs: Sequence[Blob],
        *,
        path: str,
        headers: Mapping[str, str] | None = None,
        on_bytes: OnBytes | None = None,
        stop: threading.Event | None = None,
        wait_s: int = 0,
    ) -> Answered:
        """Upload the large blobs that the box does not have, and post the job with the small ones.

        Args:
            path: where jobs of its kind are posted.
            headers: more of the posted job.
            on_bytes: see `Uploader.upload`.
            stop: once it is set, no more is uploaded, and nothing is posted.
            wait_s: how long the box may wait for the job's end before it answers.

        Raises:
            concurrent.futures.CancelledError: `stop` was set.
            GradboxError: as for `Connection.request`.
        """
        headers = {**(headers or {}), "Accept": ACCEPT, "Idempotency-Key": str(uuid.uuid4())}
        upload = partial(self._uploader.upload, on_bytes=on_bytes, stop=stop)
        small = small_ones(self._uploader.missing(blobs), job_bytes=len(job))
        upload([blob for blob in blobs if blob not in small])
        try:
            answered = self._post(path, job, small, headers, wait_s=wait_s)
        except MissingBlobs:
            # The box's owner removed blobs since this client saw them there.
            self._uploader.forget()
            upload(blobs)
            answered = self._post(path, job, (), headers, wait_s=wait_s)
        self._uploader.note(small)
        return answered

    def _post(
        self,
        path: str,
        job: bytes,
        blobs: Sequence[Blob],
        headers: Mapping[str, str],
        *,
        wait_s: int,
    ) -> Answered:
        """Post a job with blobs; repeated until it is answered, it is one job all the same."""
        content, content_type = form_of(job, blobs) if blobs else (job, "application/json")
        length = str(len(content))
        headers = {**headers, "Content-Length": length, "Content-Type": content_type}
        try:
            answer = self._connection.request(
                "POST", path, body=lambda: [content], headers=headers, wait_s=wait_s
            )
        except KeyboardInterrupt:
            print(
                f"\nthe job may have been posted to {self._connection.url}: then it is the newest "
                f"of `gradbox jobs list` and GradClient().jobs(limit=1), and goes on. To stop it: "
                f"`gradbox jobs cancel ID`",
                file=sys.stderr,
            )
            raise
        return read_answer(answer)


def small_ones(blobs: Iterable[Blob], *, job_bytes: int) -> list[Blob]:
    """Return the blobs that fit into one body with the job, the smallest first."""
    left = TOGETHER_BYTES - job_bytes - 2 * BESIDE_BYTES
    chosen: list[Blob] = []
    for blob in sorted(blobs, key=lambda blob: blob.size_bytes):
        left -= blob.size_bytes + BESIDE_BYTES
        if left < 0 or len(chosen) == MAX_BLOBS:
            break
        chosen.append(blob)
    return chosen


def read_answer(answer: httpx.Response) -> Answered:
    """Read an answer about a job.

    Raises:
        ProtocolError: it has another form.
    """
    if answer.headers.get("content-type") != JOB_AND_RESULT:
        return Answered(parsed(JobView, answer))
    try:
        return Answered(*split_result(answer.content))
    except ValueError as error:
        raise ProtocolError(
            f"expected a job and its result from {answer.request.url}, got {len(answer.content)} "
            f"bytes of another form ({error}); is this client older or newer than the box?"
        ) from None
