"""Uploading blobs: what the box does not have, each once, several at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, CancelledError, Future, ThreadPoolExecutor, wait
from typing import Final

from gradbox.http.connection import Connection
from gradbox.http.download import OnBytes
from gradbox.spans import CLIENT
from gradbox.tensors.blob import Blob

# Enough to hide the way to the box and back; more would share the same uplink.
UPLOADS_AT_ONCE: Final = 4
# A blob of this size is sent without asking: asking takes as long as the bytes.
UNASKED_BYTES: Final = 4 * 2**20
# Between two calls of `on_bytes`.
BETWEEN_S: Final = 0.2


class Uploader:
    """Uploads to one box, and remembers what is there. Any thread may call it.

    Two calls at a time that need the same blob send it once: the second waits for the first.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._lock = threading.Lock()
        # What this client has seen on the box: not asked for again when it submits in a loop.
        self._present: set[str] = set()
        self._under_way: dict[str, Future[None]] = {}

    def missing(self, blobs: Iterable[Blob]) -> list[Blob]:
        """Return the blobs that this client has not seen on the box."""
        with self._lock:
            return [blob for blob in blobs if blob.digest not in self._present]

    def note(self, blobs: Iterable[Blob]) -> None:
        """Remember that these blobs are on the box: it has taken a job that names them."""
        with self._lock:
            self._present.update(blob.digest for blob in blobs)

    def forget(self) -> None:
        """Ask again for every blob: some were removed from the box."""
        with self._lock:
            self._present.clear()

    def upload(
        self,
        blobs: Iterable[Blob],
        *,
        on_bytes: OnBytes | None = None,
        stop: threading.Event | None = None,
    ) -> None:
        """Upload what the box does not have.

        Args:
            on_bytes: called by this thread with the bytes that are there and those that there will
                be.
            stop: once it is set, no more is sent.

        Raises:
            CancelledError: `stop` was set.
            GradboxError: as for `Connection.request`.
        """
        wanted = {blob.digest: blob for blob in blobs}
        with CLIENT.span("upload"):
            self._upload(wanted, on_bytes, stop or threading.Event())

    def _upload(
        self, wanted: dict[str, Blob], on_bytes: OnBytes | None, stop: threading.Event
    ) -> None:
        while not stop.is_set():
            with self._lock:
                missing = [d for d in wanted if d not in self._present]
                own = {d: wanted[d] for d in missing if d not in self._under_way}
                others = [self._under_way[d] for d in missing if d not in own]
                self._under_way |= {digest: Future() for digest in own}
            if not missing:
                return
            self._upload_own(own, on_bytes, stop)
            # Where another call's upload failed, this one tries by itself.
            wait(others)
        raise CancelledError

    def _upload_own(
        self, own: dict[str, Blob], on_bytes: OnBytes | None, stop: threading.Event
    ) -> None:
        """Upload blobs that no other call uploads now; all are settled when it returns."""
        broken = threading.Event()

        def stopped() -> bool:
            return stop.is_set() or broken.is_set()

        sent = dict.fromkeys(own, 0)
        pool = ThreadPoolExecutor(UPLOADS_AT_ONCE)
        try:
            pending = {pool.submit(self._upload_one, blob, sent, stopped) for blob in own.values()}
            while pending:
                done, pending = wait(pending, BETWEEN_S, FIRST_COMPLETED)
                if on_bytes is not None:
                    on_bytes(sum(sent.values()), sum(blob.size_bytes for blob in own.values()))
                for future in done:
                    future.result()
        finally:
            # After an error or Ctrl-C the other uploads stop too.
            broken.set()
            pool.shutdown(cancel_futures=True)
            with self._lock:
                settled = [self._under_way.pop(digest) for digest in own]
            for future_of_others in settled:
                future_of_others.set_result(None)

    def _upload_one(self, blob: Blob, sent: dict[str, int], stopped: Callable[[], bool]) -> None:
        """Upload a blob unless the box has it. Stops once `stopped()` is true."""

        def chunks() -> Iterator[memoryview]:
            sent[blob.digest] = 0  # a repeated request begins again
            for chunk in blob.chunks():
                if stopped():
                    raise CancelledError
                yield chunk
                sent[blob.digest] += len(chunk)

        if stopped():
            raise CancelledError
        path = f"/v1/blobs/{blob.digest}"
        unasked = blob.is_new or blob.size_bytes <= UNASKED_BYTES
        if unasked or self._connection.request("HEAD", path, accept=(404,)).status_code == 404:
            headers = {
                "Content-Length": str(blob.size_bytes),
                "Content-Type": "application/octet-stream",
                "If-None-Match": "*",
            }
            self._connection.request("PUT", path, body=chunks, headers=headers, accept=(412,))
        sent[blob.digest] = blob.size_bytes
        with self._lock:
            self._present.add(blob.digest)
