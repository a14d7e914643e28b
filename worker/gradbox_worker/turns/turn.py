"""One turn: a job's record goes from queued to running and on, while a device does the work.

`TurnRunner` is where the device is, and `Attempts` also in its worker, for the attempts whose
process has ended. What happens when:

    the device …                              the record …
    ────────────────────────────────────────  ──────────────────────────────────────────────
    finished                                  done
    failed (the job's own fault)              failed, never tried again
    stopped because of a cancellation         cancelled
    stopped because the time was up           failed with JobTimedOut
    stopped because the worker leaves         queued again, no attempt used up
    died                                      queued again, or WorkerLost after the last attempt
    died of the same fault as the time before WorkerLost, or OutOfMemory: it would meet it again
    finished what its run does not take       failed with RunConflict
    cannot be started                         queued again; the worker ends
    lacks the model, and another has it       stays queued; the dispatcher feeds it again
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

import redis
from redis.client import Pipeline

from gradbox.errors import (
    GradboxError,
    InvalidInputs,
    JobFailed,
    OutOfMemory,
    RunConflict,
    StoreNotFound,
    WorkerLost,
)
from gradbox.protocol import (
    CotangentsLoss,
    JobSpec,
    JobState,
    Problem,
    SampleSpec,
    SetLossSpec,
    StateSpec,
    StepView,
    StoreFitSpec,
    StoreQuerySpec,
)
from gradbox_service.database.conditional_commands import Beside
from gradbox_service.database.refusals import store_refuses
from gradbox_service.fleet import Fleet
from gradbox_service.fleet.workers import may_be_run
from gradbox_service.jobs import JobRecord, Records, Transition, Turns
from gradbox_service.runs import Runs
from gradbox_service.store import ResultStore
from gradbox_service.stores import StorePart, StoreRecord, Stores
from gradbox_service.stores.record import check_loss
from gradbox_worker.device.last_step import LastStep
from gradbox_worker.device.orders import Orders
from gradbox_worker.turns.supervision import WORKER, JobSupervision, StopReason
from gradbox_worker.work import (
    Device,
    Died,
    Failed,
    Finished,
    Outcome,
    Stopped,
    StoreAsRead,
    StoredCurvature,
    StoredRows,
    Work,
    out_of_time,
)

log = logging.getLogger(__name__)

STORE_RETRY_S: Final = 0.5
KILLED: Final = "the worker itself was killed"


@dataclass(frozen=True)
class Attempts:
    """Begins and ends attempts at jobs, on behalf of one worker.

    With the record of an attempt that begins goes a note that the worker's device has it in hand
    (`Turns.held`), and with one that ends that it has not.
    """

    records: Records
    turns: Turns
    results: ResultStore
    runs: Runs
    stores: Stores
    worker: str  # its name
    leaving: Callable[[], bool] = lambda: False  # whether it was asked to end

    def begin(
        self,
        job_id: str,
        *,
        since: JobRecord | None,
        unless: Callable[[JobRecord], bool],
        lease_s: float,
    ) -> JobRecord | None:
        """Begin an attempt at a job.

        Args:
            since: the record as last seen.
            unless: tells of a job that it is not to be begun here.

        Returns:
            The record; None if the job is not queued, or not to be begun here.
        """

        def begun(record: JobRecord) -> JobRecord | None:
            if unless(record):
                return None
            return record.begin(worker=self.worker, now_s=time.time())

        return self._change(job_id, begun, made=self._is_ours, lease_s=lease_s, since=since)

    def end(self, record: JobRecord, outcome: Outcome, stop_reason: StopReason | None) -> str:
        """End an attempt, and keep its result only if it counts.

        Returns:
            The state that the job is left in, or "skipped" if the attempt did not count any more.
        """
        return self._end(record, _transition(record, outcome, stop_reason), outcome)

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
        self.turns.let_go(self.worker)

    def _is_ours(self, record: JobRecord) -> bool:
        return record.state is JobState.RUNNING and record.worker == self.worker

    def _end(
        self, record: JobRecord, transition: Transition | None, outcome: Outcome | None = None
    ) -> str:
        """Change the record, and keep a result only if it counts."""
        after = None
        if transition is not None:
            done = (JobState.DONE, record.attempt)
            try:
                after = self._change(
                    record.id,
                    transition,
                    made=lambda r: (r.state, r.attempt) == done,
                    since=record,
                    beside=lambda after: self._beside_the_end(after, outcome),
                )
            except (RunConflict, StoreNotFound, InvalidInputs) as error:
                log.warning("job %s: %s", record.id, error)
                return self._end(record, _failed(record, Problem.of(error)))
        if after is None:
            self.turns.let_go(self.worker)
        if after is None or after.state is not JobState.DONE:
            self.results.discard(record.id, attempt=record.attempt)
        if after is None:
            log.warning("job %s: attempt %d does not count any more", record.id, record.attempt)
            return "skipped"
        if after.state.final:
            self.results.remove_checkpoint(record.id)
        log.info("job %s: attempt %d left it %s", record.id, record.attempt, after.state)
        return str(after.state)

    def _beside_the_end(self, after: JobRecord, outcome: Outcome | None) -> Beside:
        """Return what is written with the end of an attempt: a small result, and what a run did.

        Raises:
            RunConflict: the run does not take that any more.
        """
        if not isinstance(outcome, Finished):
            return Beside()
        of_run, content = self._of_run(after, outcome), outcome.content
        if after.estimate_key and outcome.estimate is not None:
            # Before its owner hears of it, who may submit the job at once.
            self.results.estimates.keep(after.estimate_key, outcome.estimate)

        def write(pipe: Pipeline) -> None:
            of_run.write(pipe)
            if content is not None:
                self.results.write(pipe, after.id, attempt=after.attempt, content=content)

        return Beside(write, of_run.where)

    def _of_run(self, after: JobRecord, outcome: Finished) -> Beside:
        if outcome.step is not None:
            ended_s = after.finished_s or time.time()
            step = StepView(
                number=outcome.step.number,
                job=after.id,
                loss=outcome.step.loss,
                grad_norm=outcome.step.grad_norm,
                lr=outcome.step.lr,
                seconds=max(0.0, ended_s - (after.started_s or ended_s)),
                finished_s=ended_s,
            )
            return self.runs.making(outcome.step.run, step)
        if outcome.stored is not None:
            return self._of_store(after, outcome.stored)
        spec = None if outcome.saved_bytes is None else self.records.spec(after.id)
        if outcome.saved_bytes is None or not isinstance(spec, StateSpec):
            return Beside()
        run_id, name = spec.state.run or "", spec.save or ""
        return self.runs.saved(run_id, name, job=after.id, size_bytes=outcome.saved_bytes)

    def _of_store(self, after: JobRecord, stored: StoredRows | StoredCurvature) -> Beside:
        """Keep the file of a job on a store, and return the write that adds it to the store.

        Raises:
            StoreNotFound: the store was deleted.
            InvalidInputs: another job has appended some of the rows, or rows of another loss.
        """
        from gradbox_service.stores.ids import check_new, read_ids  # it takes NumPy

        path = self.results.path(after.id, attempt=after.attempt)
        self.results.note_fetched(after.id, attempt=after.attempt)  # the store has it
        self.stores.files.keep(stored.store, after.id, path)
        result, now_s = after.result, after.finished_s or time.time()
        assert result is not None
        if isinstance(stored, StoredCurvature):
            fitted = stored.view.model_copy(update={"size_bytes": result.size_bytes})
            return self.stores.adding(stored.store, lambda store: store.fitted(fitted, now_s=now_s))
        ids = read_ids(path)
        part = StorePart(
            job=after.id,
            num_rows=len(ids),
            size_bytes=result.size_bytes,
            sha256=result.sha256,
            ids="str" if ids and isinstance(ids[0], str) else "int",
        )

        def added(store: StoreRecord) -> StoreRecord:
            check_new(ids, self.stores.files.paths(store))
            check_loss(stored.loss, store)
            return store.with_part(part, loss=stored.loss, columns=stored.columns, now_s=now_s)

        return self.stores.adding(stored.store, added)

    def _change(
        self,
        job_id: str,
        transition: Transition,
        *,
        made: Callable[[JobRecord], bool],
        lease_s: float | None = None,
        since: JobRecord | None = None,
        beside: Callable[[JobRecord], Beside] = lambda _: Beside(),
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
                after = self.records.update(
                    job_id,
                    transition,
                    lease_s=lease_s,
                    holder=self.worker,
                    since=since,
                    beside=beside,
                )
                if after is None and (found := self.records.get(job_id)) and made(found):
                    return found
                return after
            except redis.RedisError as error:
                if not store_refuses(error) or self.leaving():
                    raise
                log.warning("job %s: its record is not changed yet: %s", job_id, error)
                time.sleep(STORE_RETRY_S)


@dataclass
class TurnRunner:
    """Runs jobs on one device.

    Attributes:
        attempts: begins and ends them.
        device: what computes.
        orders: what the worker has asked of this process.
        step: where steps of the running job are noted.
        lease_s: of an attempt, when it begins.
        fleet: who else there is to run what this device has no model for.
        spoilt: whether the last outcome was one after which the process is to end.
    """

    attempts: Attempts
    device: Device
    orders: Orders
    step: LastStep
    lease_s: float
    fleet: Fleet | None = None
    spoilt: bool = False

    def run(self, job_id: str) -> str:
        """Run the job if it is still queued; leave its record in the state that is due.

        Where Redis refuses for now, the begin and the end wait until it takes them.

        Returns:
            The state that the job is left in, or "skipped".

        Raises:
            redis.RedisError: Redis does not give the spec, or refuses as the worker is to end.
        """
        # Before the job is begun: without Redis no attempt is lost.
        posted, spec = self._posted(job_id)
        self.step.clear()
        record = self.attempts.begin(
            job_id, since=posted, unless=self._is_for_others, lease_s=self.lease_s
        )
        if record is None:
            log.info("job %s is not queued any more, or not for this worker", job_id)
            return "skipped"
        log.info("job %s: attempt %d begins", job_id, record.attempt)
        _record_wait(record)
        with WORKER.span("turn", parent=record.traceparent, worker=record.worker or "") as span:
            span.note(job=job_id, attempt=record.attempt)
            supervision = JobSupervision(
                self.attempts.records,
                record,
                orders=self.orders,
                step=self.step,
                traceparent=span.traceparent,
            )
            outcome = self._compute(record, spec, supervision, timed=span.traceparent is not None)
            self.spoilt = not isinstance(outcome, Finished) and outcome.leaving
            state = self.attempts.end(record, outcome, supervision.stop_reason)
            span.note(state=state)
            if state == JobState.FAILED:
                span.fail("the job failed")
        return state

    def _is_for_others(self, record: JobRecord) -> bool:
        """Return whether this device lacks the job's model while another worker may have it.

        Where nobody has it, the job is begun all the same, to fail with what there is instead.
        """
        if self.fleet is None:
            return False
        if self.device.models.get(record.model) == record.model_version:
            return False
        name = self.attempts.worker
        others = [worker for worker in self.fleet.workers() if worker.name != name]
        if not may_be_run(record.model, record.model_version, by=others):
            return False
        log.info("job %s is left to a worker that has %s", record.id, record.model)
        return True

    def _posted(self, job_id: str) -> tuple[JobRecord | None, JobSpec | Failed]:
        """Return the record, and what was posted, or why it cannot be run."""
        try:
            record, spec = self.attempts.records.with_spec(job_id)
        except GradboxError as error:  # another version of gradbox accepted it
            return None, Failed(Problem.of(error))
        missing = JobFailed("expected the job's spec in the store, found none: submit it again")
        return record, Failed(Problem.of(missing)) if spec is None else spec

    def _compute(
        self,
        record: JobRecord,
        spec: JobSpec | Failed,
        supervision: JobSupervision,
        *,
        timed: bool,
    ) -> Outcome:
        if isinstance(spec, Failed):
            return spec
        results = self.attempts.results
        work = Work(
            job_id=record.id,
            attempt=record.attempt,
            model=record.model,
            model_version=record.model_version,
            spec=spec,
            spec_digest=record.spec_digest,
            result_path=results.path(record.id, attempt=record.attempt),
            earlier_result=self._earlier_result(spec),
            store=self._store(spec),
            queued_s=max(0.0, (record.started_s or record.created_s) - record.created_s),
            disk_reserve_bytes=results.room.reserve_bytes,
            timed=timed,
            estimate=record.estimate,
        )
        return self.device.run(work, supervision)

    def _earlier_result(self, spec: JobSpec) -> Path | None:
        """Return where the outputs are that cotangents belong to, or the rows of `against`."""
        if isinstance(spec, SetLossSpec) and isinstance(spec.loss, CotangentsLoss):
            job_id: str | None = spec.loss.forward
        else:
            job_id = spec.against if isinstance(spec, SampleSpec) else None
        earlier = None if job_id is None else self.attempts.records.get(job_id)
        if earlier is None:
            return None
        return self.attempts.results.on_disk(earlier.id, attempt=earlier.attempt)

    def _store(self, spec: JobSpec) -> StoreAsRead | None:
        """Return what a job reads of a store."""
        if not isinstance(spec, StoreQuerySpec | StoreFitSpec):
            return None
        store = self.attempts.stores.get(spec.store)
        if store is None:
            return None
        files, curvature = self.attempts.stores.files, None
        if isinstance(spec, StoreQuerySpec) and spec.precondition is not None:
            view = store.curvature_of(spec.precondition)
            curvature = None if view is None else (files.path(store.id, view.job), view)
        return StoreAsRead(files.paths(store), store.columns, curvature)


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
        case Finished(result=result, estimate=estimate), _:
            return lambda r: r.finish(
                attempt=attempt, result=result, now_s=time.time(), estimate=estimate
            )
        case Failed(problem=problem), _:
            return _failed(record, problem)
        case _, StopReason.CANCELLED:
            return lambda r: r.cancelled(attempt=attempt, now_s=time.time())
        case _, StopReason.OUT_OF_TIME:
            return _failed(record, Problem.of(out_of_time(record.timeout_s)))
        case (_, StopReason.LEAVING) | (Stopped(leaving=True), None):
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


def _failed(record: JobRecord, problem: Problem) -> Transition:
    attempt = record.attempt
    return lambda record: record.fail(attempt=attempt, error=problem, now_s=time.time())


def _release(attempt: int) -> Transition:
    return lambda record: record.release(attempt=attempt, now_s=time.time())
