"""The RQ worker: takes turns off the queue and runs each on the warm device process.

RQ's own `Worker` forks for every job, which no CUDA context survives, and its `SimpleWorker` runs
the job in the worker itself, where a crash would take it along. This is a `SimpleWorker` whose
task, `run_turn`, only watches the device process. RQ does the queue's bookkeeping, as far as
`rq_bookkeeping` leaves it; the job's record, its lease and its time limit are ours, so RQ's own
timeouts are switched off.

This process never imports torch.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Final, Literal, TypeVar

import redis
from rq.exceptions import StopRequested
from rq.executions import Execution
from rq.job import Job
from rq.queue import Queue
from rq.timeouts import BaseDeathPenalty
from rq.worker.base import WorkerStatus

from gradbox.protocol import ModelView
from gradbox_service.database.refusals import store_refuses, unless_refused
from gradbox_service.fleet import Fleet
from gradbox_service.jobs import QUEUE, SERIALIZER, Records
from gradbox_service.store import ResultStore
from gradbox_worker.device import DeviceProcess, Trial
from gradbox_worker.errors import DeviceNotStarted, ModelsFileError, WorkerError
from gradbox_worker.models import read_models_file
from gradbox_worker.turns.presence import Announcer
from gradbox_worker.turns.rq_bookkeeping import BookkeepingWorker, TurnOfRq
from gradbox_worker.turns.supervision import Patience
from gradbox_worker.turns.turn import CURRENT, TurnRunner

log = logging.getLogger(__name__)

T = TypeVar("T")

# RQ forgets a worker that was silent for 60 s longer than this.
WORKER_TTL_S: Final = 20
DEQUEUE_S: Final = 1
HEARTBEAT_TTL_S: Final = 20
HEARTBEAT_S: Final = 5.0
MAINTENANCE_S: Final = 5
# Between two looks of a worker without a job at whether the models file is to be read again.
RELOAD_LOOK_S: Final = 0.5
# Between two looks at a Redis that refuses.
REFUSED_PAUSE_S: Final = 1.0


class NoDeathPenalty(BaseDeathPenalty):
    """RQ's alarm would raise in the middle of the worker's own work; the turn keeps the time."""

    def setup_death_penalty(self) -> None: ...
    def cancel_death_penalty(self) -> None: ...


class GradboxWorker(BookkeepingWorker):
    """One worker: one queue, one device process, one job at a time."""

    death_penalty_class = NoDeathPenalty

    def __init__(
        self,
        connection: redis.Redis,
        *,
        name: str,
        device: DeviceProcess,
        results: ResultStore,
        patience: Patience,
    ) -> None:
        """Hold what a worker needs; nothing starts before `work`.

        The caller holds the lock on `name`, so what Redis says under it is of a dead predecessor.

        Raises:
            redis.ConnectionError: Redis does not answer.
        """
        super().__init__(
            [QUEUE],
            name=name,
            connection=connection,
            job_class=TurnOfRq,
            serializer=SERIALIZER,
            worker_ttl=WORKER_TTL_S,
            maintenance_interval=MAINTENANCE_S,
            log_job_description=False,
        )
        self.failure: DeviceNotStarted | None = None  # why the worker ended by itself
        self._device = device
        fleet = Fleet(connection)
        self._announcer = Announcer(fleet, name=name)
        self._runner = TurnRunner(
            records=Records(connection),
            results=results,
            device=device,
            worker=name,
            patience=patience,
            leaving=lambda: self.leaving,
            alive=self._alive,
            fleet=fleet,
        )
        self._turn: Job | None = None
        self._next_heartbeat = 0.0
        self._reload_looked_s = 0.0
        self._trial: Trial | None = None  # of the models file that a reload has read

    @property
    def leaving(self) -> bool:
        """Whether the worker was asked to end."""
        return self._shutdown_requested_date is not None

    def bootstrap(self, *args: Any, **kwargs: Any) -> None:
        """Take back what a killed predecessor held, load the models, and only then take turns."""
        self._runner.recover()
        register = super().bootstrap

        def register_anew() -> None:
            # A worker that was killed in maintenance would keep its lock for 15 minutes.
            locks = [queue.registry_cleaning_key for queue in self.queues]
            self.connection.delete(self.key, *locks)
            register(*args, **kwargs)

        self._until_taken(register_anew)
        asked = self._until_taken(self._announcer.reload_asked)
        if asked is not None:
            self._announcer.note_reload(asked)
            self._device.reloads = asked
        self._have_device()
        if not any(view.usable for view in self._device.models):
            self.failure = _none_usable(self._device.models)
            raise self.failure

    def teardown(self) -> None:
        if self._trial is not None:
            self._trial.end()
        self._device.close()
        with unless_refused("the worker's end is not noted"):
            self._announcer.retire()
            super().teardown()  # type: ignore[no-untyped-call]

    def dequeue_job_and_maintain_ttl(self, *args: Any, **kwargs: Any) -> tuple[Job, Queue] | None:
        """Wait for a turn, also while Redis refuses: RQ alone waits for lost connections only."""
        return self._until_taken(partial(super().dequeue_job_and_maintain_ttl, *args, **kwargs))

    def execute_job(self, job: Job, queue: Queue) -> None:
        """Run a turn. One whose bookkeeping Redis refuses is lost, and the dispatcher's to feed."""
        self._turn, self._next_heartbeat = job, 0.0
        token = CURRENT.set(self._runner)
        try:
            super().execute_job(job, queue)
            self._announce("idle")
        except redis.RedisError as error:
            self._wait_while_refused(error)
        finally:
            CURRENT.reset(token)
            self._turn = None

    def prepare_execution(self, job: Job) -> Execution:
        """Forget the turn, and read the models file again first if that was asked for."""
        execution = super().prepare_execution(job)
        self._reload_if_asked()
        return execution

    def heartbeat(self, *args: Any, **kwargs: Any) -> None:
        """Say that the worker lives; between jobs, also start the device anew if it died."""
        self._until_taken(partial(super().heartbeat, *args, **kwargs))
        if self.get_state() == WorkerStatus.IDLE:
            self._have_device()
            if time.monotonic() - self._reload_looked_s >= RELOAD_LOOK_S:
                self._reload_if_asked()
            self._announce("idle")

    def run_maintenance_tasks(self) -> None:
        with unless_refused():  # the next one is in a few seconds
            super().run_maintenance_tasks()  # type: ignore[no-untyped-call]

    def check_for_suspension(self, burst: bool) -> None:
        self._until_taken(partial(super().check_for_suspension, burst))

    @property
    def dequeue_timeout(self) -> int:
        """How long to wait for a turn before looking after the device again, in seconds."""
        return DEQUEUE_S

    def set_shutdown_requested_date(self) -> None:
        """Note nothing: RQ does so between any two steps of a job, where Redis may refuse."""

    def get_heartbeat_ttl(self, job: Job) -> int:
        return HEARTBEAT_TTL_S

    def kill_horse(self, *_: Any) -> None:
        """End the device process: RQ asks for this when it is told twice to stop."""
        self._device.kill()

    def _alive(self) -> None:
        """Keep the worker known while a job runs: to RQ, and in the fleet."""
        if self._turn is None:
            return
        self._announce("busy", job=str(self._turn.args[0]))
        now = time.monotonic()
        if now >= self._next_heartbeat:
            self._next_heartbeat = now + HEARTBEAT_S
            with unless_refused("RQ's heartbeat is not noted"):
                self.maintain_heartbeats(self._turn)

    def _announce(self, state: Literal["idle", "busy"], *, job: str | None = None) -> None:
        building = None if self._trial is None else self._trial.building
        self._announcer.announce(state, job=job, memory=self._device.memory, building=building)

    def _until_taken(self, call: Callable[[], T]) -> T:
        """Call until Redis does not refuse only for now; return what the call returns.

        Raises:
            StopRequested: the worker was asked to end meanwhile.
        """
        while True:
            try:
                return call()
            except redis.RedisError as error:
                self._wait_while_refused(error)

    def _wait_while_refused(self, error: redis.RedisError) -> None:
        """Wait a moment if Redis refuses only for now, else raise what it said.

        Raises:
            StopRequested: the worker was asked to end meanwhile.
        """
        if not store_refuses(error):
            raise error
        if self.leaving:
            raise StopRequested from error
        log.warning("Redis refuses for now, waiting: %s", error)
        if self.get_state() == WorkerStatus.IDLE:  # a full one hears it all the same
            self._announce("idle")
        time.sleep(REFUSED_PAUSE_S)

    def _have_device(self) -> None:
        if self._device.ready:
            self._device.have_template()
            return
        self._start(self._device.ensure)

    def _reload_if_asked(self) -> None:
        """Read the models file again if that was asked for; if it cannot be, go on as before.

        Its models are tried beside the device, and offered once all are. The devices of a cluster
        build theirs by themselves.
        """
        self._reload_looked_s = time.monotonic()
        trial, device = self._trial, self._device
        if trial is not None and not trial.over:
            return
        self._trial = None
        number = self._until_taken(self._announcer.reload_asked) if trial is None else trial.number
        if number is None:
            return
        try:
            if trial is None and device.settings.cluster is None:
                read_models_file(device.settings.models_file)
                self._trial = Trial(device.settings, number=number, log=device.log)
                return
            if trial is not None and trial.failure is not None:
                self._keep_models(number, trial.failure)
                return
            tried = None if trial is None else trial.tried
            self._start(partial(device.reload, number, tried=tried))
            self._announcer.note_reload(number)
        except ModelsFileError as error:
            self._keep_models(number, error)

    def _keep_models(self, number: int, error: WorkerError) -> None:
        log.warning("the models stay as they were: %s", error)
        self._announcer.note_reload(number, error=str(error))

    def _start(self, start: Callable[..., None]) -> None:
        """Have a device process that is ready, and offer its models."""
        try:
            start(
                while_waiting=lambda: self._announcer.announce(
                    "starting", building=self._device.building
                )
            )
        except DeviceNotStarted as error:
            self.failure = error
            raise
        device = self._device
        self._until_taken(
            lambda: self._announcer.offer(
                device.models, device=device.placement, hardware=device.hardware
            )
        )


def _none_usable(models: Iterable[ModelView]) -> DeviceNotStarted:
    reasons = "; ".join(f"{view.name}: {view.reason}" for view in models)
    return DeviceNotStarted(f"expected at least one model that can be built, got none: {reasons}")
