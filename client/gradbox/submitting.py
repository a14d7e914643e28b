"""How a computation reaches the box: prepared, what the box lacks uploaded, and the job posted."""

from __future__ import annotations

import threading
from typing import Final

from gradbox.computations import Computation
from gradbox.computations.computation import Submission, prepared
from gradbox.errors import BlobRejected, InvalidInputs, MissingBlobs
from gradbox.http.connection import Connection
from gradbox.http.posting import Answered, Poster
from gradbox.inputs.uploads import KnownTensors
from gradbox.progress import ProgressBar
from gradbox.spans import CLIENT, trace_headers

WRITTEN_TO: Final = (
    "expected the tensors of a job to stay as they are while it is sent, got other numbers in "
    "some, to which another thread writes, or another task: submit copies of them (.clone())"
)


class Submitter:
    """Submits to one box, and remembers what it has sent there. Any thread may call it."""

    def __init__(self, connection: Connection) -> None:
        self._poster = Poster(connection)
        self._known = KnownTensors()

    def submit(
        self,
        computation: Computation,
        *,
        progress: bool | None,
        wait_s: int = 0,
        estimate: bool = False,
    ) -> Answered:
        """Prepare a computation and send it.

        Args:
            wait_s: how long the box may wait for the job's end before it answers.
            estimate: whether the job is to say what it would take, and no more.

        Raises:
            GradboxError: as for `prepared` and `Poster.send`.
        """

        def sent(submission: Submission) -> Answered:
            asked = submission.estimating() if estimate else submission
            return self.send(asked, progress=progress, wait_s=wait_s)

        submission = self.prepare(computation)
        try:
            return sent(submission)
        except MissingBlobs:
            return sent(self.prepare_again(computation, submission))

    def prepare(self, computation: Computation) -> Submission:
        """Return what is sent of a computation; large tensors that have changed travel together.

        Raises:
            InvalidJob: as for `prepared`.
        """
        return prepared(computation, self._known)

    def prepare_again(self, computation: Computation, lost: Submission) -> Submission:
        """Return what is sent after `MissingBlobs`, where the box has lost what it had.

        A tensor that did not change may lie in a blob with others, which nobody has any more.

        Raises:
            InvalidInputs: a tensor was written to meanwhile.
        """
        self._known.forget()
        submission = self.prepare(computation)
        digests = [[tensor.digest for tensor in sent.large] for sent in (lost, submission)]
        if digests[0] != digests[1] or not all(blob.is_unchanged for blob in lost.blobs):
            raise InvalidInputs(WRITTEN_TO)
        return submission

    def send(
        self,
        submission: Submission,
        *,
        progress: bool | None = None,
        stop: threading.Event | None = None,
        wait_s: int = 0,
    ) -> Answered:
        """Upload what the box lacks of a job, post it, and remember its large tensors.

        Args:
            wait_s: as for `submit`.

        Raises:
            concurrent.futures.CancelledError: `stop` was set: no more is uploaded or posted.
            MissingBlobs: the box has lost tensors that were sent before.
            InvalidInputs: a tensor was written to meanwhile.
            GradboxError: as for `Poster.send`.
        """
        try:
            answered = self._sent(submission, progress, stop, wait_s)
        except BlobRejected as error:
            if all(blob.is_unchanged for blob in submission.blobs):
                raise
            raise InvalidInputs(WRITTEN_TO) from error
        self._known.note(submission.large)
        return answered

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
                path=submission.path,
                headers=trace_headers(span.traceparent),
                on_bytes=bar.show_upload,
                stop=stop,
                wait_s=wait_s,
            )
            view = answered.view
            span.note(job=view.id, computation=view.computation, model=view.model)
        return answered
