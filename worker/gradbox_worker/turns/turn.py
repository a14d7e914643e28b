"""One turn: a job's record goes from queued to running and on, while a device does the work.

Nothing here knows which queue brought the turn: RQ calls `run_turn` by its name, and the in-process
worker calls `TurnRunner.run`. What happens when:

    the device …                              the record …
    ────────────────────────────────────────  ──────────────────────────────────────────────
    finished                                  done
    failed (the job's own fault)              failed, never tried again
    stopped because of a cancellation         cancelled
    stopped because the time was up           failed with JobTimedOut
    stopped because the worker leaves         queued again, no attempt used up
    died                                      queued again, or WorkerLost after the last attempt
    died of the same fault as the time before WorkerLost, or OutOfMemory: it would meet it again
    cannot be started                         queued again; the worker ends
    lacks the model, and another has it       stays queued; the dispatcher feeds it again
"""

from __future__ import annotations

import contextvars
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final

import redis

from gradbox.errors import GradboxError, JobFailed, JobTimedOut, OutOfMemory, WorkerLost
from gradbox.protocol import CotangentsLoss, GradientSpec, JobSpec, JobState, Problem, SampleSpec
from gradbox_service.database.refusals import store_refuses
from gradbox_service.fleet import Fleet
from gradbox_service.fleet.workers import may_be_run
from gradbox_service.jobs import JobRecord, Records, Transition
from gradbox_service.store import ResultStore
from gradbox_worker.errors import DeviceNotStarted
from gradbox_worker.turns.supervision import WORKER, Patience, StopReason, Watch
from gradbox_worker.work import Device, Died, Failed, Finished, Outcome, Work

log = logging.getLogger(__name__)

STORE_RETRY_S: Final = 0.5
KILLED: Final = "the worker itself was killed"


def run_turn(job_id: str) -> str:
    """Run a job in the worker whose process this is: the task that RQ's turns name."""
    return CURRENT.get().run(job_id)


@dataclass(frozen=True)
class TurnRunner:
    """Runs jobs on one device, on behalf of one worker."""

    records: Records
    results: ResultStore
    device: Device
    worker: str  # the worker's name, for the records
    patience: Patience = field(default_factory=Patience)
    leaving: Callable[[], bool] = lambda: False  # whether the worker was asked to end
    alive: Callable[[], None] = lambda: None  # called with every beat
    fleet: Fleet | None = None  # who else there is to run what this device has no model for

    def run(self, job_id: str) -> str:
        """Run the job if it is still queued; leave its record in the state that is due.

        Where Redis refuses for now, the begin and the end wait until it takes them.

        Returns:
            The state that the job is left in, or "skipped".

        Raises:
            DeviceNotStarted: the job is queued again, but the worker had better end.
            redis.RedisError: Redis does not give the spec, or refuses as the worker is to end.
        """
        spec = self._spec(job_id)  # before the job is begun: without Redis no attempt is lost
        lease_s = self.patience.lease_s
        record = self._change(job_id, self._begun, made=self._is_ours, lease_s=lease_s)
        if record is None:
            log.info("job %s is not queued any more, or not for this worker", job_id)
            return "skipped"
        log.info("job %s: attempt %d begins", job_id, record.attempt)
        _record_wait(record)
        with WORKER.span("turn", parent=record.traceparent, worker=self.worker) as span:
            span.note(job=job_id, attempt=record.attempt)
            state = self._run(record, spec, traceparent=span.traceparent)
            span.note(state=state)
            if state == JobState.FAILED:
                span.fail("the job failed")
        return state

    def _run(self, record: JobRecord, spec: JobSpec | Failed, *, traceparent: str | None) -> str:
        watch = Watch(
            self.records,
            record.id,
            attempt=record.attempt,
            timeout_s=record.timeout_s,
            patience=self.patience,
            leaving=self.leaving,
            alive=self.alive,
            traceparent=traceparent,
        )
        try:
            outcome = self._compute(record, spec, watch, timed=traceparent is not None)
        except DeviceNotStarted:
            self._end(record, _release(record.attempt))
            raise
        return self._end(record, _transition(record, outcome, watch.stop_reason))

    def recover(self) -> None:
        """Take back the jobs that a worker of this name held when it was killed.

        Only for a worker that is sure to be the only one of its name.
        """
        for record in self.records.active():
            if self._is_ours(record):
                log.warning("job %s was held when a worker of this name was killed", record.id)
                lose = partial(
                    JobRecord.requeue, attempt=record.attempt, reason=KILLED, now_s=time.time()
                )
                self._end(record, lose)

    def _is_ours(self, record: JobRecord) -> bool:
        return record.state is JobState.RUNNING and record.worker == self.worker

    def _begun(self, record: JobRecord) -> JobRecord | None:
        for_others = self._is_for_others(record)
        return None if for_others else record.begin(worker=self.worker, now_s=time.time())

    def _is_for_others(self, record: JobRecord) -> bool:
        """Return whether this device lacks the job's model while another worker may have it.

        Where nobody has it, the job is begun all the same, to fail with what there is instead.
        """
        if self.fleet is None:
            return False
        wanted = (record.model, record.model_version)
        if wanted in [(model.name, model.version) for model in self.device.models]:
            return False
        others = [worker for worker in self.fleet.workers() if worker.name != self.worker]
        if not may_be_run(*wanted, by=others):
            return False
        log.info("job %s is left to a worker that has %s", record.id, record.model)
        return True

    def _spec(self, job_id: str) -> JobSpec | Failed:
        """Return what was posted, or why it cannot be run."""
        try:
            spec = self.records.spec(job_id)
        except GradboxError as error:  # another version of gradbox accepted it
            return Failed(Problem.of(error))
        missing = JobFailed("expected the job's spec in the store, found none: submit it again")
        return Failed(Problem.of(missing)) if spec is None else spec

    def _compute(
        self, record: JobRecord, spec: JobSpec | Failed, watch: Watch, *, timed: bool
    ) -> Outcome:
        if isinstance(spec, Failed):
            return spec
        work = Work(
            job_id=record.id,
            attempt=record.attempt,
            model=record.model,
            model_version=record.model_version,
            spec=spec,
            spec_digest=record.spec_digest,
            result_path=self.results.path(record.id, attempt=record.attempt),
            earlier_result=self._earlier_result(spec),
            queued_s=max(0.0, (record.started_s or record.created_s) - record.created_s),
            disk_reserve_bytes=self.results.room.reserve_bytes,
            timed=timed,
        )
        return self.device.run(work, watch)

    def _earlier_result(self, spec: JobSpec) -> Path | None:
        """Return where the outputs are that cotangents belong to, or the rows of `against`."""
        if isinstance(spec, GradientSpec) and isinstance(spec.loss, CotangentsLoss):
            job_id: str | None = spec.loss.forward
        else:
            job_id = spec.against if isinstance(spec, SampleSpec) else None
        earlier = None if job_id is None else self.records.get(job_id)
        if earlier is None:
            return None
        return self.results.path(earlier.id, attempt=earlier.attempt)

    def _end(self, record: JobRecord, transition: Transition | None) -> str:
        """Change the record, and keep a result only if it counts."""
        after = None
        if transition is not None:
            done = (JobState.DONE, record.attempt)
            after = self._change(record.id, transition, made=lambda r: (r.state, r.attempt) == done)
        if after is None or after.state is not JobState.DONE:
            self.results.discard(record.id, attempt=record.attempt)
        if after is None:
            log.warning("job %s: attempt %d does not count any more", record.id, record.attempt)
            return "skipped"
        if after.state.final:
            self.results.remove_checkpoint(record.id)
        log.info("job %s: attempt %d left it %s", record.id, record.attempt, after.state)
        return str(after.state)

    def _change(
        self,
        job_id: str,
        transition: Transition,
        *,
        made: Callable[[JobRecord], bool],
        lease_s: float | None = None,
    ) -> JobRecord | None:
        """Change the record as soon as Redis takes it.

        However long that is: the dispatcher takes no job from a worker that Redis would not let
        beat, and if it did all the same, the transition does not apply.

        Args:
            made: tells of a record that the transition does not apply to whether it was made: its
                answer may have been lost. Only this worker can have made it.

        Raises:
            redis.RedisError: Redis still refuses when the worker is asked to end.
        """
        while True:
            try:
                after = self.records.update(job_id, transition, lease_s=lease_s)
                if after is None and (found := self.records.get(job_id)) and made(found):
                    return found
                return after
            except redis.RedisError as error:
                if not store_refuses(error) or self.leaving():
                    raise
                log.warning("job %s: its record is not changed yet: %s", job_id, error)
                time.sleep(STORE_RETRY_S)


# The runner that `run_turn` speaks to: RQ hands a task nothing but its arguments.
CURRENT: contextvars.ContextVar[TurnRunner] = contextvars.ContextVar("gradbox turn runner")


def _record_wait(record: JobRecord) -> None:
    """Record how long a job waited. When a later attempt was queued, no record says."""
    if record.attempt == 1 and record.started_s is not None:
        began_s, ended_s = record.created_s, record.started_s
        WORKER.record("queue wait", parent=record.traceparent, began_s=began_s, ended_s=ended_s)


def _transition(
    record: JobRecord, outcome: Outcome, stop_reason: StopReason | None
) -> Transition | None:
    """Return how the record is to change; None if the job is not ours any more."""
    attempt = record.attempt
    match outcome, stop_reason:
        case Finished(result=result), _:
            return lambda r: r.finish(attempt=attempt, result=result, now_s=time.time())
        case Failed(problem=problem), _:
            return lambda r: r.fail(attempt=attempt, error=problem, now_s=time.time())
        case _, StopReason.CANCELLED:
            return lambda r: r.cancelled(attempt=attempt, now_s=time.time())
        case _, StopReason.OUT_OF_TIME:
            problem = Problem.of(_out_of_time(record))
            return lambda r: r.fail(attempt=attempt, error=problem, now_s=time.time())
        case _, StopReason.LEAVING:
            return _release(attempt)
        case Died() as died, None:
            return lambda r: _lose(r, died, attempt=attempt)
        case _:
            return None


def _lose(record: JobRecord, died: Died, *, attempt: int) -> JobRecord | None:
    """Count the attempt as lost, or end the job if the same fault has ended the one before."""
    repeats = died.fault is not None and died.fault == record.last_fault
    if repeats and not record.cancel_requested:
        return record.fail(attempt=attempt, error=Problem.of(_repeated(died)), now_s=time.time())
    reason = f"its device process ended: {died.reason}"
    return record.requeue(attempt=attempt, reason=reason, fault=died.fault, now_s=time.time())


def _repeated(died: Died) -> JobFailed:
    if died.out_of_memory:
        return OutOfMemory(
            f"expected the job to fit into the machine's memory, but two attempts were {died.fault}"
            f", and a third would be; submit it with smaller shards or a smaller retain"
        )
    return WorkerLost(
        f"two attempts ended by the same fault ({died.fault}): {died.reason}, and a third would "
        f"end so, too; if smaller shards do not help, ask the box's owner for the worker's log"
    )


def _out_of_time(record: JobRecord) -> JobTimedOut:
    return JobTimedOut(
        f"expected the job to end within its timeout_s of {record.timeout_s:g} s, but it still "
        f"ran; submit it with a larger timeout_s, or with fewer or shorter shards"
    )


def _release(attempt: int) -> Transition:
    return lambda record: record.release(attempt=attempt, now_s=time.time())
