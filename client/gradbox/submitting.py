"""How a computation reaches the box: prepared, what the box lacks uploaded, and the job posted."""

from __future__ import annotations

import threading

from gradbox.computations import Computation
from gradbox.computations.computation import Submission, prepared
from gradbox.errors import BlobRejected, InvalidInputs, MissingBlobs
from gradbox.http.connection import Connection
from gradbox.http.posting import Answered, Poster
from gradbox.inputs.known_tensors import KnownTensors
from gradbox.progress import ProgressBar
from gradbox.spans import CLIENT, trace_headers


class Submitter:
    """Submits to one box, and remembers what it has sent there. Any thread may call it."""

    def __init__(self, connection: Connection) -> None:
        self._poster = Poster(connection)
        self._known = KnownTensors()

    def submit(
        self, computation: Computation, *, progress: bool | None, wait_s: int = 0
    ) -> Answered:
        """Prepare a computation and send it; large tensors that have changed travel together.

        Args:
            wait_s: how long the box may wait for the job's end before it answers.

        Raises:
            GradboxError: as for `prepared` and `Poster.send`.
        """
        submission = prepared(computation, self._known)
        try:
            answered = self.send(submission, progress=progress, wait_s=wait_s)
        except MissingBlobs:
            # A tensor that did not change may lie in a blob with others, which nobody has any more.
            self._known.forget()
            submission = prepared(computation, self._known)
            answered = self.send(submission, progress=progress, wait_s=wait_s)
        self._known.note(submission.large)
        return answered

    def send(
        self,
        submission: Submission,
        *,
        progress: bool | None = None,
        stop: threading.Event | None = None,
        wait_s: int = 0,
    ) -> Answered:
        """Upload what the box lacks of a job, and post it.

        Args:
            wait_s: as for `submit`.

        Raises:
            concurrent.futures.CancelledError: `stop` was set: no more is uploaded or posted.
            InvalidInputs: a tensor was written to meanwhile.
            GradboxError: as for `Poster.send`.
        """
        try:
            return self._sent(submission, progress, stop, wait_s)
        except BlobRejected as error:
            if all(blob.is_unchanged for blob in submission.blobs):
                raise
            raise InvalidInputs(
                "expected the tensors of a job to stay as they are while it is sent, got other "
                "numbers in some, to which another thread writes: submit copies of them (.clone())"
            ) from error

    def _sent(
        self,
        submission: Submission,
        progress: bool | None,
        stop: threading.Event | None,
        wait_s: int,
    ) -> Answered:
        spec = submission.spec
        title = spec.name or "inputs"
        with ProgressBar(title, shown=progress) as bar, CLIENT.span("submit") as span:
            answered = self._poster.send(
                spec.model_dump_json().encode(),
                submission.blobs,
                headers=trace_headers(span.traceparent),
                on_bytes=bar.show_upload,
                stop=stop,
                wait_s=wait_s,
            )
            view = answered.view
            span.note(job=view.id, computation=view.computation, model=view.model)
        return answered
