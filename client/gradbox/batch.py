"""Many jobs at a time: `with client.batch() as batch`."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from typing import Final

from gradbox.computations import Computation
from gradbox.computations.computation import Submission, prepared
from gradbox.errors import GradboxError
from gradbox.job import Job
from gradbox.progress import ProgressBar
from gradbox.results.result import GradResult

# Jobs whose inputs are uploaded and which are posted at a time.
SENT_AT_ONCE: Final = 4

Send = Callable[[Submission, threading.Event], Job]


class Batch:
    """Jobs that are sent while the next ones are made, and whose results are gathered.

        with client.batch() as batch:
            for shards in datasets:
                batch.submit(Gradient(model="minilm", inputs=shards, loss=info_nce))
        for found in batch.results():
            if isinstance(found, GradResult):
                ...

    `submit` traces the functions at once, so what cannot be traced is raised there. Uploads and
    posts follow in a few threads, in no order; a large blob that several jobs need is sent once.
    The tensors handed in must stay as they are until the context is left, which waits until every
    job is posted or refused. A job that fails, in whatever way, does not change what becomes of the
    others. If the context is left by an exception, what has not been sent is not sent, and jobs
    that the box has taken continue: `jobs` has them.
    """

    def __init__(self, send: Send) -> None:
        self._send = send
        self._stop = threading.Event()
        self._pool = ThreadPoolExecutor(SENT_AT_ONCE, thread_name_prefix="gradbox-batch")
        self._sent: list[Future[Job]] = []

    def __enter__(self) -> Batch:
        return self

    def __exit__(self, kind: object, *raised: object) -> None:
        if kind is not None:
            self._stop.set()
        self._pool.shutdown(cancel_futures=kind is not None)

    def __len__(self) -> int:
        return len(self._sent)

    def submit(self, computation: Computation) -> Future[Job]:
        """Trace a computation, and return the future of the handle on its job, which is sent.

        Raises:
            InvalidJob: it is no computation, or one that cannot be run as it is.
            RuntimeError: the context was left.
        """
        sent = self._pool.submit(self._send, prepared(computation), self._stop)
        self._sent.append(sent)
        return sent

    @property
    def jobs(self) -> list[Job]:
        """The jobs that the box has taken, in the order in which they were submitted."""
        done = [sent for sent in self._sent if sent.done() and not sent.cancelled()]
        return [sent.result() for sent in done if sent.exception() is None]

    def results(self, *, progress: bool | None = None) -> list[GradResult | GradboxError]:
        """Wait for all jobs and return their results, in the order in which they were submitted.

        Where a job was refused, failed or was cancelled, its error stands in place of the result.

        Args:
            progress: whether to show a progress bar, as for `Job.wait`.
        """
        found: list[GradResult | GradboxError] = []
        with ProgressBar("batch", shown=progress) as bar:
            for sent in self._sent:
                bar.show_jobs(len(found), len(self._sent))
                found.append(_outcome(sent))
            bar.show_jobs(len(found), len(self._sent))
        return found

    def cancel(self) -> None:
        """Cancel every job that is not over, and send no more."""
        self._stop.set()
        self._pool.shutdown(cancel_futures=True)
        for job in self.jobs:
            job.cancel()


def _outcome(sent: Future[Job]) -> GradResult | GradboxError:
    try:
        return sent.result().result(progress=False)
    except CancelledError:
        return GradboxError("the job was not sent, because the batch was left before; submit it")
    except GradboxError as error:
        return error
