"""Every error gradbox raises, and how each travels.

    GradboxError
    ├── InvalidJob (ValueError)         what was handed in cannot be run as it is
    │   ├── UntraceableLoss             a Python function that does not become a graph
    │   ├── GraphRefused                a graph with something outside the allow-list in it
    │   ├── UnknownModel                no model of that name, or not that version of it
    │   │   └── UnusableModel           the box has it in its models file and cannot build it
    │   ├── InvalidInputs               shards, arguments, shapes, names
    │   │   └── MissingBlobs            the job names blobs that the box does not have
    │   └── BlobRejected                bytes that are not what they were said to be
    │       └── BlobTooLarge            more bytes than the box takes at once
    ├── Unauthorized                    no token, or not one this box knows
    ├── OwnerOnly                       what only the box's owner may ask for
    ├── JobNotFound                     no such job, or somebody else's
    ├── RunNotFound                     no such run, state or save, or somebody else's
    ├── RunConflict                     a step or a save out of turn: the run is elsewhere
    ├── StoreNotFound                   no such store, or one that this token may not read
    ├── StoreConflict                   a store of that name is made in another way
    ├── IdempotencyConflict             one key, two different jobs
    ├── ResultNotReady                  the job has no result: it still runs, or it did not end well
    ├── ResultGone                      the job had a result, and it has been removed
    ├── BlobInUse                       the blob is needed by a job that waits or runs
    ├── NeedsBox                        what only a box does, asked of GradClient.local
    ├── InvalidRequest                  a query, a header or a range that the box does not take
    ├── JobFailed                       the job ended in `failed`
    │   ├── ReplayMismatch              a replay did not reproduce the first pass
    │   ├── LossNotFinite               the loss is NaN or infinite
    │   ├── GradientNotFinite           a gradient of a run's step is: the run is as before
    │   ├── NotPositiveDefinite         conjugate gradients met curvature that is not positive
    │   ├── LossNotScalar               the loss has more than one entry
    │   ├── ModelCallFailed             the model refused its inputs
    │   ├── OutOfMemory                 one shard does not fit
    │   ├── JobTimedOut                 `timeout_s` ran out
    │   └── WorkerLost                  the device process died and no attempt was left
    ├── JobCancelled                    the job ended in `cancelled`
    ├── ServiceUnavailable              the box cannot be reached, or asks to come back later
    │   ├── BoxDraining                 the box takes no new jobs, because it is about to end
    │   ├── StorageFull                 the box's disk, or the owner's share of it, is full
    │   └── TooManyRequests             more requests than one user may send
    │       └── QueueFull               more waiting jobs than one owner may have
    └── ProtocolError                   the other side speaks something else

On the wire an error is an RFC 9457 problem whose `type` is `urn:gradbox:problem:CODE`; each class
here names its CODE, and what the box refused is raised on the laptop as the same class. A job that
failed raises the class that its problem names, as a `JobFailed` too. Messages hold no character
that does not print, since parts of them may come from the other side.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from traceback import TracebackException
from typing import ClassVar, Final, Literal

from gradbox.printable import printable

_OURS: Final = os.path.join(os.path.dirname(__file__), "")
_STANDARD: Final = os.path.join(os.path.dirname(os.__file__), "")
_INSTALLED: Final = frozenset({"site-packages", "dist-packages"})

Category = Literal["user", "server", "transient"]


def is_library(filename: str) -> bool:
    """Tell whether a file is Python's own, or installed."""
    return filename.startswith(_STANDARD) or not _INSTALLED.isdisjoint(filename.split(os.sep))


class GradboxError(Exception):
    """Something gradbox was asked to do did not happen; the message says what to do about it.

    `category` is who can do something about it; of a problem from the wire, what that says.
    """

    code: ClassVar[str] = "error"
    title: ClassVar[str] = "gradbox error"
    category: Category = "server"
    status: ClassVar[int] = 500

    def __str__(self) -> str:
        return printable(super().__str__(), lines=True)

    def _render_traceback_(self) -> list[str]:
        """Return the lines that a notebook shows: of the stack the user's own. IPython calls it."""
        shown = TracebackException.from_exception(self)
        shown.stack[:] = [
            frame
            for frame in shown.stack
            if not (frame.filename.startswith((_OURS, "<")) or is_library(frame.filename))
        ]
        return "".join(shown.format(chain=False)).splitlines()


class InvalidJob(GradboxError, ValueError):
    """What was handed in cannot be run as it is."""

    code = "invalid-job"
    title = "The job cannot be run as it is"
    category = "user"
    status = 422


class UntraceableLoss(InvalidJob):
    """A Python function could not be turned into a graph of allowed operations."""

    code = "untraceable-loss"
    title = "The function cannot be traced"


class GraphRefused(InvalidJob):
    """A graph holds something that the allow-list or its limits do not admit."""

    code = "graph-refused"
    title = "The graph is refused"


class UnknownModel(InvalidJob):
    """The box has no model of that name, or not that version of it."""

    code = "unknown-model"
    title = "No such model"


class UnusableModel(UnknownModel):
    """The box's models file names the model, but no worker could build it; the message says why."""

    code = "unusable-model"
    title = "The model cannot be used"


class InvalidInputs(InvalidJob):
    """Shards, argument names, shapes or parameter names do not fit the model or each other."""

    code = "invalid-inputs"
    title = "The inputs do not fit"


class MissingBlobs(InvalidInputs):
    """The job names blobs that the box does not have.

    Attributes:
        missing: their digests, as many as were worth listing.
    """

    code = "missing-blobs"
    title = "Blobs are missing"

    def __init__(self, message: str, *, missing: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.missing = missing


class BlobRejected(InvalidJob):
    """Uploaded bytes are not what they were said to be."""

    code = "blob-rejected"
    title = "The uploaded bytes are refused"


class BlobTooLarge(BlobRejected):
    """A body is larger than the box takes at once."""

    code = "blob-too-large"
    title = "Too many bytes"
    status = 413


class Unauthorized(GradboxError):
    """No token came, or one that this box does not know."""

    code = "unauthorized"
    title = "A valid token is needed"
    category = "user"
    status = 401


class OwnerOnly(GradboxError):
    """Only the token of the box's owner may ask for this."""

    code = "owner-only"
    title = "Only the box's owner may"
    category = "user"
    status = 403


class JobNotFound(GradboxError):
    """No job of that id is visible to this token."""

    code = "job-not-found"
    title = "No such job"
    category = "user"
    status = 404


class RunNotFound(GradboxError):
    """No run, state or save of that name is visible to this token."""

    code = "run-not-found"
    title = "No such run"
    category = "user"
    status = 404


class StoreNotFound(GradboxError):
    """No store of that name may be read, or written, with this token."""

    code = "store-not-found"
    title = "No such store"
    category = "user"
    status = 404


class StoreConflict(GradboxError):
    """A store of that name is there, and made in another way; or a job needs it."""

    code = "store-conflict"
    title = "The store is another one"
    category = "user"
    status = 409


class RunConflict(GradboxError):
    """A step, a save or a deletion does not fit where the run is; the message says where that is.

    Another client made the step, or is making it. Nothing has changed.

    Attributes:
        num_steps: how many steps the run has made.
        under_way: the job of the step that follows, if it was posted.
    """

    code = "run-conflict"
    title = "The run is elsewhere"
    category = "user"
    status = 409

    def __init__(
        self, message: str, *, num_steps: int | None = None, under_way: str | None = None
    ) -> None:
        super().__init__(message)
        self.num_steps = num_steps
        self.under_way = under_way


class IdempotencyConflict(GradboxError):
    """An idempotency key was used again with another job."""

    code = "idempotency-conflict"
    title = "The key belongs to another job"
    category = "user"
    status = 422


class ResultNotReady(GradboxError):
    """The job has no result, or none yet."""

    code = "result-not-ready"
    title = "No result yet"
    category = "user"
    status = 409


class ResultGone(GradboxError):
    """The job had a result, which was deleted or has expired since."""

    code = "result-gone"
    title = "The result is gone"
    category = "user"
    status = 410


class BlobInUse(GradboxError):
    """A job that waits or runs needs the blob that was to be deleted."""

    code = "blob-in-use"
    title = "A job needs the blob"
    category = "user"
    status = 409


class NeedsBox(GradboxError):
    """Only a box does this, and the client computes in its own process: `GradClient.local`."""

    code = "needs-box"
    title = "Only a box does this"
    category = "user"
    status = 501


class InvalidRequest(GradboxError):
    """The box does not take the request itself: a query, a header or a range of it."""

    code = "invalid-request"
    title = "The request is refused"
    category = "user"
    status = 422


class JobFailed(GradboxError):
    """The job ended in `failed`."""

    code = "job-failed"
    title = "The job failed"
    category: Category = "server"


class ReplayMismatch(JobFailed):
    """A replayed shard differs from its first pass by more than rounding."""

    code = "replay-mismatch"
    title = "The replay differs from the first pass"
    category = "user"
    status = 422


class LossNotFinite(JobFailed):
    """The loss is NaN or infinite, so it has no gradient."""

    code = "loss-not-finite"
    title = "The loss is not finite"
    category = "user"
    status = 422


class GradientNotFinite(JobFailed):
    """A gradient of a run's step is NaN or infinite: the step was not made, its number is free."""

    code = "gradient-not-finite"
    title = "The gradient is not finite"
    category = "user"
    status = 422


class NotPositiveDefinite(JobFailed):
    """Conjugate gradients met a direction along which the curvature is not positive."""

    code = "not-positive-definite"
    title = "The curvature is not positive definite"
    category = "user"
    status = 422


class LossNotScalar(JobFailed):
    """The loss has more than one entry."""

    code = "loss-not-scalar"
    title = "The loss is not a scalar"
    category = "user"
    status = 422


class ModelCallFailed(JobFailed):
    """The model, or the loss, raised on what it was given."""

    code = "model-call-failed"
    title = "The model or the loss raised an error"
    category = "user"
    status = 422


class OutOfMemory(JobFailed):
    """One shard's graph does not fit into the device's memory."""

    code = "out-of-memory"
    title = "Out of memory"
    category = "user"
    status = 422


class JobTimedOut(JobFailed):
    """The job ran longer than its `timeout_s`."""

    code = "job-timed-out"
    title = "Out of time"
    category = "user"
    status = 422


class WorkerLost(JobFailed):
    """The process that computed the job died, and no attempt was left."""

    code = "worker-lost"
    title = "The worker was lost"
    category = "transient"
    status = 503


class JobCancelled(GradboxError):
    """The job ended in `cancelled`."""

    code = "job-cancelled"
    title = "The job was cancelled"
    category = "user"
    status = 409


class ServiceUnavailable(GradboxError):
    """The box cannot be reached, or asks to come back later."""

    code = "service-unavailable"
    title = "The service is unavailable"
    category: Category = "transient"
    status = 503


class BoxDraining(ServiceUnavailable):
    """The box takes no new jobs: its owner lets it end once nothing runs."""

    code = "draining"
    title = "The box is about to end"


class StorageFull(ServiceUnavailable):
    """The box's disk is full, or the share of it that one owner may use."""

    code = "storage-full"
    title = "The disk is full"
    status = 507


class TooManyRequests(ServiceUnavailable):
    """One user sent, or has open, more requests than may be; `Retry-After` says when to go on."""

    code = "rate-limited"
    title = "Too many requests"
    status = 429


class QueueFull(TooManyRequests):
    """As many of the owner's jobs wait as may at once, or their specs take too much memory."""

    code = "queue-full"
    title = "The queue is full"


class ProtocolError(GradboxError):
    """The other side sent something that this version of gradbox does not understand."""

    code = "protocol-error"
    title = "The answer is not understood"
