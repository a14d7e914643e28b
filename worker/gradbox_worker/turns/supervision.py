"""How a running job is watched: its lease, requests to cancel it, its time limit, its progress.

Two objects for one attempt. `JobSupervision` is where it runs: between two shards it looks at the
clock, and at the job's record when the worker has asked for that. `AttemptWatch` is in the worker,
which never computes: twice a second it keeps the lease, publishes progress, and finds out that the
job is to stop, and when that has to be forced.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial
from typing import Final

from gradbox.protocol import ProgressView
from gradbox.spans import Spans
from gradbox_service.database.refusals import unless_refused
from gradbox_service.jobs import JobRecord, Records, Turn
from gradbox_worker.device.last_step import JobStep, LastStep
from gradbox_worker.device.orders import Orders

WORKER: Final = Spans("gradbox-worker")
# A replayed shard costs a forward and a backward, about three forwards.
REPLAY_COST: Final = 3.0


class StopReason(Enum):
    """Why a job is to stop before it ends by itself."""

    NOT_OURS = auto()  # the attempt was given to somebody else meanwhile
    CANCELLED = auto()
    OUT_OF_TIME = auto()
    LEAVING = auto()  # the worker was asked to end


@dataclass(frozen=True)
class Patience:
    """How long things may take, in seconds."""

    lease_s: float = 20.0  # the record says that the worker is lost after so long a silence
    cancel_grace_s: float = 30.0  # for a cancelled job's shard to end before the process is killed
    timeout_grace_s: float = 5.0  # the same when the time limit has passed


class JobSupervision:
    """Implements `Supervision` for one attempt, in the process that computes it.

    Attributes:
        stop_reason: why the job is to stop, once it is.
    """

    def __init__(
        self,
        records: Records,
        record: JobRecord,
        *,
        orders: Orders,
        step: LastStep,
        traceparent: str | None = None,
    ) -> None:
        """Start the attempt's clock.

        Args:
            orders: what the worker has asked for.
            step: where steps are noted.
            traceparent: the parent of the spans of its phases.
        """
        self.stop_reason: StopReason | None = None
        self._records, self._record = records, record
        self._orders, self._step = orders, step
        self._traceparent = traceparent
        self._deadline = time.monotonic() + record.timeout_s

    def stop_requested(self) -> bool:
        """Return whether the job is to stop; looks at its record only when asked to."""
        if self.stop_reason is None:
            if self._orders.look or self._orders.leaving:
                self._orders.look = False
                self.stop_reason = self._found()
            elif time.monotonic() >= self._deadline:
                self.stop_reason = StopReason.OUT_OF_TIME
        return self.stop_reason is not None

    def progress(self, phase: str, done: int, total: int) -> None:
        """Note how far the job is, for the worker to read."""
        self._step.note(phase, done, total)

    def phase_ended(self, phase: str, *, began_s: float, ended_s: float) -> None:
        """Record the phase as a span."""
        WORKER.record(phase, parent=self._traceparent, began_s=began_s, ended_s=ended_s)

    def _found(self) -> StopReason | None:
        found = None
        with unless_refused("job %s: whether it is to stop is not known", self._record.id):
            found = why_stop(self._records.get(self._record.id), self._record.attempt)
        if found is None and time.monotonic() >= self._deadline:
            return StopReason.OUT_OF_TIME
        return StopReason.LEAVING if found is None and self._orders.leaving else found


class AttemptWatch:
    """Watches one attempt from outside the process that computes it.

    Attributes:
        held: the attempt.
        stop_reason: why the job is to stop, once it is.
    """

    def __init__(self, records: Records, held: Turn, *, patience: Patience) -> None:
        """Look at nothing yet."""
        self.held = held
        self.stop_reason: StopReason | None = None
        self._records, self._patience = records, patience
        self._deadline: float | None = None
        self._kill_at = 0.0
        self._published: JobStep | None = None
        self._phase_began = 0.0
        self._phase_began_at = 0

    def look(self, step: JobStep | None) -> None:
        """Keep the lease, find out whether the job is to stop, and let others know how far it is.

        Args:
            step: the last step that the process has noted.
        """
        held = self.held
        with unless_refused("job %s: its lease is not renewed", held.job_id):
            record = self._records.beat(
                held.job_id, attempt=held.attempt, lease_s=self._patience.lease_s
            )
            self._find_stop(record)
            if record is not None and record.unsaid:
                say = partial(JobRecord.say_running, attempt=held.attempt)
                self._records.update(held.job_id, say, since=record)
        if step is not None and step != self._published:
            with unless_refused("job %s: its progress is not noted", held.job_id):
                self._publish(step)

    def is_overdue(self) -> bool:
        """Return whether the job was to stop so long ago that its process is to be killed."""
        return self.stop_reason is not None and time.monotonic() >= self._kill_at

    def _find_stop(self, record: JobRecord | None) -> None:
        if self.stop_reason is not None:
            return
        now = time.monotonic()
        if record is not None and self._deadline is None:
            ran_s = time.time() - (record.started_s or time.time())
            self._deadline = now + record.timeout_s - max(0.0, ran_s)
        self.stop_reason = why_stop(record, self.held.attempt)
        self._kill_at = now + self._patience.cancel_grace_s
        if self.stop_reason is None and self._deadline is not None and now >= self._deadline:
            self.stop_reason = StopReason.OUT_OF_TIME
            self._kill_at = now + self._patience.timeout_grace_s

    def _publish(self, step: JobStep) -> None:
        now, before = time.monotonic(), self._published
        self._published = step
        if before is None or before.phase != step.phase:
            self._phase_began, self._phase_began_at = now, step.done
        view = ProgressView(
            phase=step.phase,
            done=step.done,
            total=step.total,
            seconds_left=self._seconds_left(now, step),
        )
        attempt = self.held.attempt
        self._records.update(
            self.held.job_id, lambda record: record.advance(attempt=attempt, progress=view)
        )

    def _seconds_left(self, now: float, step: JobStep) -> float | None:
        """Extrapolate this phase, and the replay from the forward pass."""
        counted = step.done - self._phase_began_at
        if counted <= 0:
            return None
        per_shard_s = (now - self._phase_began) / counted
        left = float(step.total - step.done)
        if step.phase == "forward":
            left += REPLAY_COST * step.total
        return per_shard_s * left


def why_stop(record: JobRecord | None, attempt: int) -> StopReason | None:
    """Return why an attempt is to stop, by the job's record as it is now."""
    if record is None or not record.held_by(attempt):
        return StopReason.NOT_OURS
    return StopReason.CANCELLED if record.cancel_requested else None
