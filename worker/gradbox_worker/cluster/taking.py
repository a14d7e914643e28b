"""The head's main loop: takes a turn once a device is idle, and has a thread run it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from contextlib import closing
from typing import Final

import redis

from gradbox.errors import GradboxError
from gradbox.protocol import JobSpec, JobState, StepSpec, StoreQuerySpec
from gradbox_service.database.refusals import store_refuses, unless_refused
from gradbox_service.fleet import Fleet
from gradbox_service.jobs import Records, Turn, Turns
from gradbox_service.runs import Runs
from gradbox_service.store import BlobStore, ResultStore
from gradbox_service.stores import Stores
from gradbox_worker.cluster.head import ClusterDevices, Slot, is_on_run
from gradbox_worker.cluster.ray_session import RayOnThisMachine
from gradbox_worker.cluster.turn import NamedDevices
from gradbox_worker.device.last_step import LastStep
from gradbox_worker.device.orders import Orders
from gradbox_worker.errors import DeviceNotStarted
from gradbox_worker.turns.supervision import Patience
from gradbox_worker.turns.turn import Attempts, TurnRunner
from gradbox_worker.turns.worker import RqEntry

log = logging.getLogger(__name__)

LOOK_S: Final = 1.0
TAKE_S: Final = 0.5
BUSY_S: Final = 0.2
# Between two tries of what Redis refuses.
REFUSED_PAUSE_S: Final = 1.0
# Jobs that run when the head is to end stop before their next shard, and are queued again.
LEAVE_S: Final = 40.0
ENDED: Final = "Ray on this machine ended"
NAME: Final = "cluster"


class TurnTaker:
    """Takes turns for all devices of a cluster."""

    def __init__(
        self,
        connection: redis.Redis,
        devices: ClusterDevices,
        *,
        joined: RayOnThisMachine,
        results: ResultStore,
        blobs: BlobStore,
        patience: Patience,
    ) -> None:
        """Take none yet.

        Args:
            joined: Ray, which is looked at now and then.
        """
        self._turns, self._records = Turns(connection), Records(connection)
        self._fleet, self._runs = Fleet(connection), Runs(connection)
        self._stores = Stores(connection, results.data)
        self._rq = RqEntry(connection, NAME)
        self._devices, self._joined = devices, joined
        self._results, self._blobs, self._patience = results, blobs, patience
        self._running: dict[threading.Thread, Orders] = {}
        self._leaving = False
        self._look_s = 0.0

    def recover(self) -> None:
        """Queue again what an earlier head held when it ended: all that runs on this box."""
        running = [r for r in self._records.active() if r.state is JobState.RUNNING]
        for worker in {record.worker for record in running if record.worker}:
            self._attempts(worker).recover()
        self._rq.begin()

    def run(self, stopping: threading.Event) -> None:
        """Take turns until told to end; then stop what runs.

        Raises:
            DeviceNotStarted: Ray has ended.
            redis.RedisError: Redis refuses for good.
        """
        try:
            while not stopping.is_set():
                try:
                    self._take()
                except redis.RedisError as error:
                    if not store_refuses(error):
                        raise
                    log.warning("Redis refuses for now, waiting: %s", error)
                    self._devices.announce()
                    stopping.wait(REFUSED_PAUSE_S)
        finally:
            self._leave()

    def _take(self) -> None:
        """Take a turn, if a device is there to run it."""
        now_s = time.monotonic()
        if now_s >= self._look_s:
            self._look_s = now_s + LOOK_S
            if not self._joined.answers():
                raise DeviceNotStarted(ENDED)
            self._devices.look()
            self._devices.reload_if_asked()
            self._devices.announce()
            self._running = {t: orders for t, orders in self._running.items() if t.is_alive()}
            self._rq.renew(busy=bool(self._running))
        if not self._devices.idle():
            with self._devices.changed:
                self._devices.changed.wait(BUSY_S)
            return
        turn = self._turns.take(wait_s=TAKE_S)
        record = None if turn is None else self._records.get(turn.job_id)
        if turn is None or record is None:
            return
        spec = self._spec(record.id)
        after, rows_bytes = self._last_step(spec), self._rows_bytes(spec)
        slots = self._devices.name(record, spec, after=after, rows_bytes=rows_bytes)
        if not slots:  # all have died while it was waited for, or those that it wants are busy
            self._turns.feed(turn)
            return
        orders = Orders()
        thread = threading.Thread(target=self._run, args=(turn, slots, orders), daemon=True)
        self._running[thread] = orders
        thread.start()

    def _spec(self, job_id: str) -> JobSpec | None:
        """Return a job's spec; None for one that will fail for it."""
        try:
            return self._records.spec(job_id)
        except GradboxError:
            return None

    def _last_step(self, spec: JobSpec | None) -> str:
        """Return the job that made the last step of the run on whose state a job is."""
        if spec is None or not is_on_run(spec):
            return ""
        run_id = spec.run if isinstance(spec, StepSpec) else spec.state and spec.state.run
        run = self._runs.get(run_id or "")
        return "" if run is None else run.last_job

    def _rows_bytes(self, spec: JobSpec | None) -> int:
        """Return how large the rows of the store are that a job queries."""
        store = self._stores.get(spec.store) if isinstance(spec, StoreQuerySpec) else None
        return 0 if store is None else sum(part.size_bytes for part in store.parts)

    def _run(self, turn: Turn, slots: Sequence[Slot], orders: Orders) -> None:
        """Run a turn to its end, in a thread of its own."""
        devices = NamedDevices(
            slots,
            self._devices,
            records=self._records,
            blobs=self._blobs,
            orders=orders,
            patience=self._patience,
        )
        try:
            if not devices.first_lives():  # the job has not begun
                self._turns.feed(turn)
                return
            with closing(LastStep()) as step:
                runner = TurnRunner(
                    self._attempts(slots[0].name),
                    devices,
                    orders,
                    step,
                    lease_s=self._patience.lease_s,
                )
                runner.run(turn.job_id)
        except redis.RedisError as error:  # the turn is lost, and the dispatcher's to feed
            log.warning("job %s is not run now: %s", turn.job_id, error)
        finally:
            devices.close()

    def _attempts(self, worker: str) -> Attempts:
        return Attempts(
            self._records,
            self._turns,
            self._results,
            self._runs,
            self._stores,
            worker,
            leaving=lambda: self._leaving,
        )

    def _leave(self) -> None:
        """Have all jobs that run stopped and queued again, and say that the devices are gone."""
        self._leaving = True
        for orders in self._running.values():
            orders.ask_for_end()
            orders.ask_to_look()
        deadline = time.monotonic() + LEAVE_S
        for thread in self._running:
            thread.join(max(0.0, deadline - time.monotonic()))
        with unless_refused("the end of the cluster is not noted"):
            self._devices.retire()
            self._rq.end()
