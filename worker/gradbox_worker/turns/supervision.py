"""How a running job is watched: its lease, requests to cancel it, its time limit, its progress.

One object for one attempt. The device calls it several times a second; it looks at the clock and
at the job's record, and says whether and why the job is to stop.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final

from gradbox.protocol import ProgressView
from gradbox.spans import Spans
from gradbox_service.database.refusals import unless_refused
from gradbox_service.jobs import Records
from gradbox_worker.work import StopOrder

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
    beat_s: float = 0.5  # between two looks at the record
    progress_s: float = 0.2  # before the first progress event, and between two
    cancel_grace_s: float = 30.0  # for a cancelled job's shard to end before the process is killed
    timeout_grace_s: float = 5.0  # the same when the time limit has passed


class Watch:
    """Implements `Supervision` for one attempt at one job."""

    def __init__(
        self,
        records: Records,
        job_id: str,
        *,
        attempt: int,
        timeout_s: float,
        patience: Patience,
        leaving: Callable[[], bool],
        alive: Callable[[], None],
        traceparent: str | None = None,
    ) -> None:
        """Start the attempt's clock.

        Args:
            traceparent: the parent of the spans of its phases.
            leaving: tells whether the worker was asked to end.
            alive: called with every beat, for the worker's own heartbeats.
        """
        self.stop_reason: StopReason | None = None
        self._records = records
        self._job_id = job_id
        self._attempt = attempt
        self._patience = patience
        self._leaving = leaving
        self._alive = alive
        self._traceparent = traceparent
        self._deadline = time.monotonic() + timeout_s
        # The attempt has just begun, with a fresh lease and nothing asked of it.
        self._next_beat = time.monotonic() + patience.beat_s
        self._first_progress = time.monotonic() + patience.progress_s
        self._next_progress = 0.0
        # Progress before the first event of it was due; `poll` writes it then.
        self._early_progress: tuple[str, int, int] | None = None
        self._phase = ""
        self._phase_began = 0.0
        self._phase_began_at = 0

    def poll(self) -> StopOrder | None:
        """Beat when it is time, and say whether the job is to stop."""
        now = time.monotonic()
        if now >= self._next_beat:
            self._next_beat = now + self._patience.beat_s
            self._beat()
        if self._early_progress is not None and now >= self._first_progress:
            phase, done, total = self._early_progress
            self._next_progress = now
            self.progress(phase, done, total)
        if self.stop_reason is None and now >= self._deadline:
            self.stop_reason = StopReason.OUT_OF_TIME
        if self.stop_reason is None and self._leaving():
            self.stop_reason = StopReason.LEAVING
        if self.stop_reason is None:
            return None
        if self.stop_reason is StopReason.OUT_OF_TIME:
            return StopOrder(self._patience.timeout_grace_s)
        return StopOrder(self._patience.cancel_grace_s)

    def progress(self, phase: str, done: int, total: int) -> None:
        """Note progress in the record, at most every `progress_s` within a phase.

        A job that ends before the first `progress_s` never has any.
        """
        now = time.monotonic()
        if phase != self._phase:
            self._phase, self._phase_began, self._phase_began_at = phase, now, done
        elif now < self._next_progress:
            return
        if now < self._first_progress:
            self._early_progress = (phase, done, total)
            return
        self._early_progress = None
        self._next_progress = now + self._patience.progress_s
        view = ProgressView(
            phase=phase, done=done, total=total, seconds_left=self._seconds_left(now, done, total)
        )
        with unless_refused("job %s: its progress is not noted", self._job_id):
            self._records.update(
                self._job_id, lambda record: record.advance(attempt=self._attempt, progress=view)
            )

    def phase_ended(self, phase: str, *, began_s: float, ended_s: float) -> None:
        """Record the phase as a span."""
        WORKER.record(phase, parent=self._traceparent, began_s=began_s, ended_s=ended_s)

    def _beat(self) -> None:
        with unless_refused("job %s: its lease is not renewed", self._job_id):
            record = self._records.beat(
                self._job_id, attempt=self._attempt, lease_s=self._patience.lease_s
            )
            self._alive()
            if record is None or not record.held_by(self._attempt):
                self.stop_reason = StopReason.NOT_OURS
            elif record.cancel_requested:
                self.stop_reason = StopReason.CANCELLED

    def _seconds_left(self, now: float, done: int, total: int) -> float | None:
        """Extrapolate this phase, and the replay from the forward pass."""
        counted = done - self._phase_began_at
        if counted <= 0:
            return None
        per_shard_s = (now - self._phase_began) / counted
        left = float(total - done)
        if self._phase == "forward":
            left += REPLAY_COST * total
        return per_shard_s * left
