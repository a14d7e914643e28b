"""`gradbox worker`: watches the device process that takes the turns, and never computes.

Twice a second it looks

    at the process     starts the next one where it has ended, and counts the attempt it held
    at what it holds   keeps the lease of the attempt, publishes its progress, and has it stopped
                       once it is cancelled or over its time; kills what does not stop
    at the models      reads their file again when that is asked for
    at the fleet       announces what the device offers, to the service and to RQ

Which attempt the device holds is noted with the record of the job that begins (`Turns.held`), so
it costs a short job nothing, and whoever is killed at whatever time leaves it known. This process
never imports torch.
"""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Mapping
from typing import Final

import redis
import rq

from gradbox_service.database.refusals import store_refuses, unless_refused
from gradbox_service.fleet import Fleet
from gradbox_service.jobs import QUEUE, SERIALIZER, Records, Turn, Turns
from gradbox_service.runs import Runs
from gradbox_service.store import ResultStore
from gradbox_service.stores import Stores
from gradbox_worker.device import DeviceProcess, DeviceSettings
from gradbox_worker.device.entry import DeviceEntries
from gradbox_worker.device.exits import Exit, died
from gradbox_worker.device.orders import LAST, LOOK
from gradbox_worker.device.output import BoundedLog
from gradbox_worker.device.settings import TurnSettings
from gradbox_worker.errors import DeviceNotStarted, ModelsFileError, WorkerError
from gradbox_worker.models import read_models_file
from gradbox_worker.turns.presence import Announcer
from gradbox_worker.turns.supervision import AttemptWatch, Patience, StopReason
from gradbox_worker.turns.turn import Attempts
from gradbox_worker.work import Outcome, Stopped

log = logging.getLogger(__name__)

LOOK_S: Final = 0.5
# While it waits for a process to be ready, or to end.
SHORT_LOOK_S: Final = 0.1
# Between two tries of what Redis refuses.
REFUSED_PAUSE_S: Final = 1.0
# RQ forgets a worker that was silent for 60 s longer than this.
WORKER_TTL_S: Final = 20
HEARTBEAT_S: Final = 5.0


class Worker:
    """One worker: one queue, one device, one job at a time.

    Attributes:
        leaving: whether it was asked to end.
    """

    def __init__(
        self,
        connection: redis.Redis,
        *,
        name: str,
        redis_url: str,
        settings: DeviceSettings,
        results: ResultStore,
        patience: Patience,
    ) -> None:
        """Hold what a worker needs; nothing starts before `run`.

        The caller holds the lock on `name`, so what Redis says under it is of a dead predecessor.
        """
        self.leaving = False
        self._connection, self._name = connection, name
        self._settings, self._patience = settings, patience
        self._turn_settings = TurnSettings(
            worker=name,
            redis_url=redis_url,
            lease_s=patience.lease_s,
            disk_reserve_bytes=results.room.reserve_bytes,
        )
        self._log = None if settings.log is None else BoundedLog(settings.log)
        self._fleet, self._records = Fleet(connection), Records(connection)
        self._turns, self._entries = Turns(connection), DeviceEntries(connection, name)
        self._attempts = Attempts(
            self._records,
            self._turns,
            results,
            Runs(connection),
            Stores(connection, results.data),
            name,
            leaving=lambda: self.leaving,
        )
        self._announcer = Announcer(self._fleet, name=name)
        self._rq = RqEntry(connection, name)
        self._device = self._new_device(reloads=0)
        self._next: DeviceProcess | None = None  # one that reads the models file again
        self._watch: AttemptWatch | None = None
        self._killed: Turn | None = None  # what the process was killed for
        self._num_signals = 0
        self._kill_at = 0.0  # once it is leaving
        self._retiring = False  # the process that serves ends after its job: the next is ready

    def run(self) -> None:
        """Work until told to stop.

        Raises:
            DeviceNotStarted: there is no device process any more.
            redis.RedisError: Redis does not answer at first, or refuses for good.
        """
        before = {
            number: signal.signal(number, self._on_signal)
            for number in (signal.SIGINT, signal.SIGTERM)
        }
        self._connection.ping()
        begun = False
        try:
            while not (self.leaving and self._device.pid is None):
                try:
                    if not begun:
                        self._begin()
                        begun = True
                    self._look()
                except redis.RedisError as error:
                    if not store_refuses(error):
                        raise
                    if self.leaving:
                        break
                    log.warning("Redis refuses for now, waiting: %s", error)
                    self._announce()
                    time.sleep(REFUSED_PAUSE_S)
                    continue
                self._device.wait(LOOK_S if self._device.ready else SHORT_LOOK_S)
        finally:
            for device in (self._device, self._next):
                if device is not None:
                    device.close()
            with unless_refused("the worker's end is not noted"):
                self._entries.forget_all()
                self._announcer.retire()
                self._rq.end()
            for number, handler in before.items():
                signal.signal(number, handler)

    def _begin(self) -> None:
        """Take back what a killed predecessor held, and say that the worker is there."""
        self._attempts.recover()
        self._entries.forget_all()
        self._rq.begin()
        asked = self._fleet.reloads()
        self._announcer.note_reload(asked)
        self._device.reloads = asked

    def _look(self) -> None:
        ended = self._device.look()
        if ended is not None:
            self._count(ended)
            self._go_on(ended)
        elif self.leaving:
            self._end_device()
        self._watch_attempt()
        self._look_at_models()
        if self._device.ready:
            self._offer()
        self._announce()
        self._rq.renew(busy=self._watch is not None)

    # --- the process and what it holds -----------------------------------------------------------

    def _watch_attempt(self) -> None:
        held = self._turns.held(self._name)
        if held is None:
            self._watch = None
            return
        if self._watch is None or self._watch.held != held:
            self._watch = AttemptWatch(self._records, held, patience=self._patience)
        watch = self._watch
        watch.look(self._device.last_step)
        if watch.stop_reason is not None:
            self._device.signal(LOOK)
        if watch.is_overdue() and self._killed != held:
            log.warning("job %s does not stop: killing the device process", held.job_id)
            self._killed = held
            self._device.kill()

    def _count(self, ended: Exit) -> None:
        """End the attempt that the process held when it ended, if it held one."""
        held = self._turns.held(self._name)
        record = None if held is None else self._records.get(held.job_id)
        if held is not None and record is not None and record.held_by(held.attempt):
            self._attempts.end(record, *self._what_became(held, ended))
        elif held is not None:
            self._turns.let_go(self._name)
        self._watch = self._killed = None

    def _what_became(self, held: Turn, ended: Exit) -> tuple[Outcome, StopReason | None]:
        """Return what became of the attempt that the process held, and why it was to stop."""
        if self._killed == held and self._watch is not None:
            return Stopped(), self._watch.stop_reason
        if self.leaving or self._killed is not None:  # it had begun the next one by then
            return Stopped(), StopReason.LEAVING
        return died(ended, self._device.last_step), None

    def _go_on(self, ended: Exit) -> None:
        """Have the next process start, or take over if it is there."""
        if self.leaving:
            self._device.close()
        elif self._retiring and self._next is not None:
            self._device.close()
            self._device, self._next, self._retiring = self._next, None, False
            self._device.trial = False
            self._device.signal(LOOK)
        else:
            self._device.note_end(ended)

    def _end_device(self) -> None:
        """Have the device end: warmly while there is time, and at once if it is not ready yet."""
        now = time.monotonic()
        if not self._kill_at:
            self._kill_at = now + self._patience.cancel_grace_s
        if not self._device.ready or self._num_signals > 1 or now >= self._kill_at:
            self._device.kill()
            return
        self._device.signal(LAST)
        self._device.signal(LOOK)

    # --- the models ------------------------------------------------------------------------------

    def _look_at_models(self) -> None:
        """Read the models file again if that was asked for; if it cannot be, go on as before.

        Its models are tried beside the device, by the process that is the next one once all are.
        """
        if self.leaving:
            return
        if self._next is not None:
            self._look_at_next(self._next)
            return
        asked = self._fleet.reloads()
        is_read = asked in (self._announcer.reloads, self._device.reloads)
        if is_read or self._retiring or not self._device.ready:
            return
        try:
            read_models_file(self._settings.models_file)
        except ModelsFileError as error:
            self._keep_models(asked, error)
            return
        self._next = self._new_device(reloads=asked)

    def _look_at_next(self, following: DeviceProcess) -> None:
        try:
            ended = following.look()
            if ended is not None:
                following.note_end(ended)
        except DeviceNotStarted as error:
            following.close()
            self._next, self._retiring = None, False
            self._keep_models(following.reloads, error)
            return
        if following.tried or self._retiring:
            self._retiring = True
            self._device.signal(LAST)

    def _keep_models(self, number: int, error: WorkerError) -> None:
        log.warning("the models stay as they were: %s", error)
        self._announcer.note_reload(number, error=str(error))

    def _new_device(self, *, reloads: int) -> DeviceProcess:
        return DeviceProcess(
            self._settings,
            self._turn_settings,
            entries=self._entries,
            log=self._log,
            reloads=reloads,
            trial=reloads > 0,
        )

    # --- the fleet -------------------------------------------------------------------------------

    def _offer(self) -> None:
        entry = self._device.entry
        if not entry.models and not self._announcer.has_offered:
            raise _none_usable(entry.unusable)
        self._announcer.offer(entry)
        if self._device.reloads > self._announcer.reloads:  # once its models are offered
            self._announcer.note_reload(self._device.reloads)

    def _announce(self) -> None:
        device, following = self._device, self._next
        self._announcer.announce(
            "idle" if device.ready else "starting",
            memory=device.entry.memory,
            building=device.building if following is None else following.building,
        )

    def _on_signal(self, *_: object) -> None:
        self.leaving = True
        self._num_signals += 1


class RqEntry:
    """The worker as `rq info` shows it; RQ has no other part in a turn than the list of them."""

    def __init__(self, connection: redis.Redis, name: str) -> None:
        self._connection, self._name = connection, name
        self._worker: rq.SimpleWorker | None = None
        self._renewed_s = 0.0
        self._busy = False

    def begin(self) -> None:
        """Note that the worker begins."""
        worker = rq.SimpleWorker(
            [QUEUE],
            name=self._name,
            connection=self._connection,
            serializer=SERIALIZER,
            worker_ttl=WORKER_TTL_S,
        )
        self._connection.delete(worker.key)  # of a predecessor that was killed
        with unless_refused():  # where it is full, its heartbeats alone show it
            worker.register_birth()  # type: ignore[no-untyped-call]
        self._worker = worker

    def renew(self, *, busy: bool) -> None:
        """Note that it lives, now and then, and whether it is busy."""
        now_s = time.monotonic()
        if self._worker is None or (busy == self._busy and now_s - self._renewed_s < HEARTBEAT_S):
            return
        with unless_refused():
            self._worker.set_state("busy" if busy else "idle")
            self._worker.heartbeat()
        self._renewed_s, self._busy = now_s, busy

    def end(self) -> None:
        """Note that it has ended."""
        if self._worker is not None:
            self._worker.register_death()  # type: ignore[no-untyped-call]


def _none_usable(unusable: Mapping[str, str]) -> DeviceNotStarted:
    reasons = "; ".join(f"{name}: {reason}" for name, reason in unusable.items())
    return DeviceNotStarted(f"expected at least one model that can be built, got none: {reasons}")
