"""A job's record, and how it may change.

    queued ──begin──▶ running ──finish──▶ done
      │  ▲               │ ├────fail────▶ failed
      │  └──requeue──────┤ └─cancelled──▶ cancelled
      └──request_cancel──┼──────────────▶ cancelled

A transition is a pure function: it returns the next record, or None if it does not apply. What a
worker says is fenced by the number of the attempt it speaks for, so that a worker that was thought
dead and comes back late changes nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace

from pydantic import TypeAdapter

from gradbox.errors import WorkerLost
from gradbox.protocol import (
    EstimateView,
    JobState,
    JobView,
    Problem,
    ProgressView,
    ResultView,
)
from gradbox_service.database.owned import OwnedRecord

MAX_ATTEMPTS = 3


@dataclass(frozen=True)
class QueuePosition:
    """Where one queued job is in the queue.

    Attributes:
        position: 1 for the job that is handed out next.
        waiting_for: how many jobs of each owner run or come before; those with most jobs alone.
        begins_s: about when it begins, in seconds since 1970; None if nobody can say.
        hold: why no job that waits is handed to a worker, if none is.
    """

    position: int
    waiting_for: Mapping[str, int] = field(default_factory=dict)
    begins_s: float | None = None
    hold: str | None = None

    @property
    def seconds_left(self) -> float | None:
        """About how long from now until it begins."""
        return None if self.begins_s is None else round(max(0.0, self.begins_s - time.time()), 1)

    def to_json(self) -> bytes:
        return _POSITION.dump_json(self)

    @classmethod
    def from_json(cls, text: bytes) -> QueuePosition:
        """Raises:
        ValueError: these are not the bytes of a position.
        """
        return _POSITION.validate_json(text)


@dataclass(frozen=True, kw_only=True)
class JobRecord(OwnedRecord):
    """Everything about a job but its spec, which never changes and is stored beside it."""

    computation: str
    # The registered name, and the full version that the box had when it accepted the job.
    model: str
    model_version: str
    # The digest of the spec as it was posted.
    spec_digest: str
    # What the poster called it.
    name: str = ""
    # From -10 to 10; higher goes first.
    priority: int = 0
    # How long one attempt may run.
    timeout_s: float = 3600.0
    state: JobState = JobState.QUEUED
    # The number of the current or last attempt, 0 before the first. It fences what workers say.
    attempt: int = 0
    # How many attempts ended with the worker lost; the last allowed one is `max_attempts`.
    losses: int = 0
    max_attempts: int = MAX_ATTEMPTS
    # What the job's own code ran into when the last attempt was lost, and where; None if the
    # worker was ended from outside.
    last_fault: str | None = None
    # When the last attempt began, and when the job ended.
    started_s: float | None = None
    finished_s: float | None = None
    # Who holds, or last held, the job.
    worker: str | None = None
    # Asked of a running job; its worker reads this with every beat.
    cancel_requested: bool = False
    progress: ProgressView | None = None
    error: Problem | None = None
    result: ResultView | None = None
    # When the result's file was deleted.
    result_gone_s: float | None = None
    # That it was posted with, if any.
    idempotency_key: str = ""
    # The parent of the job's spans, see `gradbox.spans`.
    traceparent: str | None = None
    # Handed out as it was posted, and nothing is said of it yet: that is a worker's who looks after
    # it, or its end comes first.
    unsaid: bool = False
    # What was kept of its like when it was accepted; of a job that estimates, what it has found.
    estimate: EstimateView | None = None
    # Under which a job that estimates keeps that.
    estimate_key: str = ""

    @property
    def result_bytes(self) -> int:
        """What the job's result takes on disk; 0 if there is none."""
        if self.result is None or self.result_gone_s is not None:
            return 0
        return self.result.size_bytes

    def begin(self, *, worker: str, now_s: float) -> JobRecord | None:
        """Hand the queued job to `worker` as its next attempt."""
        if self.state is not JobState.QUEUED:
            return None
        return replace(
            self,
            state=JobState.RUNNING,
            attempt=self.attempt + 1,
            worker=worker,
            started_s=now_s,
        )

    def advance(self, *, attempt: int, progress: ProgressView) -> JobRecord | None:
        """Note how far the attempt is."""
        return replace(self, progress=progress, unsaid=False) if self.held_by(attempt) else None

    def say_running(self, *, attempt: int) -> JobRecord | None:
        """Let those who watch the job know that the attempt runs, if they don't."""
        return replace(self, unsaid=False) if self.unsaid and self.held_by(attempt) else None

    def finish(
        self,
        *,
        attempt: int,
        result: ResultView,
        now_s: float,
        estimate: EstimateView | None = None,
    ) -> JobRecord | None:
        """End the job with a result file that is in its place, and with all its shards done.

        Args:
            estimate: what it has found, if it was to estimate a job.
        """
        if not self.held_by(attempt):
            return None
        progress = self.progress
        if progress is not None:
            # The worker notes progress now and then, and the last shards not always.
            progress = progress.model_copy(update={"done": progress.total, "seconds_left": None})
        return replace(
            self,
            state=JobState.DONE,
            result=result,
            finished_s=now_s,
            progress=progress,
            estimate=estimate or self.estimate,
        )

    def fail(self, *, attempt: int, error: Problem, now_s: float) -> JobRecord | None:
        """End the job for a reason that another attempt would meet again."""
        if not self.held_by(attempt):
            return None
        return replace(self, state=JobState.FAILED, error=error, finished_s=now_s)

    def cancelled(self, *, attempt: int, now_s: float) -> JobRecord | None:
        """End the job because its worker stopped it as asked."""
        if not self.held_by(attempt):
            return None
        return replace(
            self, state=JobState.CANCELLED, cancel_requested=True, finished_s=now_s, progress=None
        )

    def requeue(
        self, *, attempt: int, reason: str, now_s: float, fault: str | None = None
    ) -> JobRecord | None:
        """Count the attempt as lost: queue the job again, or end it if no attempt is left.

        Args:
            reason: what happened to the worker, a clause without a full stop.
            fault: what the job's own code ran into, and where.
        """
        if not self.held_by(attempt):
            return None
        lost = replace(self, losses=self.losses + 1, progress=None, last_fault=fault, unsaid=False)
        if self.cancel_requested:
            return replace(lost, state=JobState.CANCELLED, finished_s=now_s)
        if lost.losses < self.max_attempts:
            return replace(lost, state=JobState.QUEUED)
        problem = Problem.of(
            WorkerLost(
                f"the worker was lost in {lost.losses} of {self.max_attempts} allowed attempts, "
                f"the last time because {reason}; if smaller shards do not help, ask the box's "
                f"owner to look at the log of worker {self.worker!r}"
            )
        )
        return replace(lost, state=JobState.FAILED, error=problem, finished_s=now_s)

    def release(self, *, attempt: int, now_s: float) -> JobRecord | None:
        """Give the job back because its worker stops in order; no attempt is used up."""
        if not self.held_by(attempt):
            return None
        if self.cancel_requested:
            return self.cancelled(attempt=attempt, now_s=now_s)
        return replace(self, state=JobState.QUEUED, progress=None, unsaid=False)

    def request_cancel(self, *, now_s: float) -> JobRecord | None:
        """Cancel the job if it waits; ask its worker to stop it if it runs."""
        if self.state is JobState.QUEUED:
            return replace(self, state=JobState.CANCELLED, cancel_requested=True, finished_s=now_s)
        if self.state is JobState.RUNNING and not self.cancel_requested:
            return replace(self, cancel_requested=True, unsaid=False)
        return None

    def drop_result(self, *, now_s: float) -> JobRecord | None:
        """Note that the result's file is deleted."""
        if self.result is None or self.result_gone_s is not None:
            return None
        return replace(self, result_gone_s=now_s)

    def as_posted(self) -> JobRecord:
        """Return it as it was before anything became of it."""
        return replace(
            self,
            state=JobState.QUEUED,
            attempt=0,
            worker=None,
            started_s=None,
            finished_s=None,
            cancel_requested=False,
            progress=None,
            error=None,
            result=None,
        )

    @property
    def spec_is_read(self) -> bool:
        """Whether somebody may read the spec: the job's worker, or a job that goes on from it."""
        return not self.state.final or self.state is JobState.DONE

    @property
    def stage(self) -> tuple[int, int]:
        """What grows with every change of the state: see `JobState.stage`."""
        return self.state.stage(self.attempt)

    def held_by(self, attempt: int) -> bool:
        """Return whether `attempt` is the one that runs now."""
        return self.state is JobState.RUNNING and self.attempt == attempt

    def view(self, *, waits_at: QueuePosition | None = None) -> JobView:
        """Return what the wire says of this job, with its position if it waits."""
        if self.state is not JobState.QUEUED:
            waits_at = None
        return JobView(
            **{name: getattr(self, name) for name in _SHOWN},
            attempts=self.attempt,
            queue_position=None if waits_at is None else waits_at.position,
            waiting_for=None if waits_at is None else dict(waits_at.waiting_for),
            seconds_left=None if waits_at is None else waits_at.seconds_left,
            hold=None if waits_at is None else waits_at.hold,
        )


# What the wire calls as the record does.
_SHOWN = JobView.model_fields.keys() & {item.name for item in fields(JobRecord)}

Transition = Callable[[JobRecord], JobRecord | None]

_POSITION = TypeAdapter(QueuePosition)
