"""The device process once torch is there: opens its device, then takes turns until it is to end."""

from __future__ import annotations

import errno
import gc
import logging
import os
import resource
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Final, NoReturn, TypeVar, cast

import redis

from gradbox.protocol import DeviceMemory, ModelBuild
from gradbox_service.database.connection import PATIENT, connect
from gradbox_service.database.refusals import store_refuses, unless_refused
from gradbox_service.fleet import Fleet
from gradbox_service.jobs import Records, Turns
from gradbox_service.runs import Runs
from gradbox_service.store import BlobStore, ResultStore
from gradbox_service.stores import Stores
from gradbox_worker.device.entry import DeviceEntries, DeviceEntry
from gradbox_worker.device.importing import import_for_jobs
from gradbox_worker.device.last_step import LastStep
from gradbox_worker.device.orders import Orders
from gradbox_worker.device.settings import Start
from gradbox_worker.device.warm_device import WarmDevice
from gradbox_worker.exceptions_to_problems import Caught, caught
from gradbox_worker.runs import RecordedRuns
from gradbox_worker.turns.turn import Attempts, TurnRunner

log = logging.getLogger(__name__)

T = TypeVar("T")

# Of one wait for a turn, after which the process looks whether it is to end.
TAKE_S: Final = 1.0
# So long after it is ready it imports what jobs need, unless one waits already.
QUIET_S: Final = 0.05
# Between two tries of what Redis refuses.
REFUSED_PAUSE_S: Final = 1.0
GO_S: Final = 0.05


def serve(start: Start, orders: Orders) -> None:
    """Open the device, and run jobs until told to end, or until one has spoilt the device."""
    # One connection for the one thread: to take it from a pool costs as much as a short command.
    connection = cast(redis.Redis, cast(Any, connect(start.turns.redis_url)).client())
    patient = connect(start.turns.redis_url, retries=PATIENT)  # for what a running job reads
    notes = Notes(DeviceEntries(connection, start.turns.worker), start.mark)
    fleet, records, runs = Fleet(connection), Records(connection), Runs(connection)
    reserve_bytes = start.turns.disk_reserve_bytes
    results = ResultStore(start.settings.data, connection=patient, reserve_bytes=reserve_bytes)

    def opened(start: Start) -> WarmDevice:
        device = WarmDevice(
            start.settings,
            measured=notes.measured,
            known=start.known,
            unusable=start.unusable,
            blobs=BlobStore(start.settings.data, connection=patient),
            before_building=lambda name: notes.note(
                building=ModelBuild(model=name, since_s=time.time())
            ),
            book=RecordedRuns(Runs(patient), Records(patient), results),
            disk_reserve_bytes=reserve_bytes,
        )
        until_taken(partial(fleet.describe, [view for view in device.views if view.usable]))
        return device

    device = caught(
        partial(opened, _beside(start) if start.trial else start),
        doing="the device process's start",
    )
    if start.trial and not isinstance(device, Caught):
        notes.note_device("tried", device)
        while not orders.look:
            time.sleep(GO_S)
        start = replace(start, known=device.models, unusable=device.unusable)
        del device
        device = caught(partial(opened, start), doing="the device process's start")
    if isinstance(device, Caught):
        notes.note(problem=device.problem.detail)
        return
    gc.freeze()  # what has been imported
    turns = Turns(connection)
    attempts = Attempts(
        records,
        turns,
        results,
        runs,
        Stores(connection, results.data),
        start.turns.worker,
        leaving=lambda: orders.leaving,
    )
    runner = TurnRunner(
        attempts,
        device,
        orders,
        LastStep(start.step_fd),
        lease_s=start.turns.lease_s,
        fleet=fleet,
    )
    notes.note_device("ready", device)
    take_turns(
        turns,
        runner,
        when_quiet=partial(import_for_jobs, start.settings.models_file),
    )
    if runner.spoilt:
        _leave()
    with unless_refused():
        device.close()


def take_turns(turns: Turns, runner: TurnRunner, *, when_quiet: Callable[[], object]) -> None:
    """Run jobs until no more are to be taken, or the process is of no use any more.

    Args:
        when_quiet: called once, when no job has waited.
    """
    quiet = False
    while not runner.orders.last:
        wait_s = TAKE_S if quiet else QUIET_S
        try:
            left_s = runner.device.rest()
            if left_s is not None:
                wait_s = min(wait_s, max(0.01, left_s))
            turn = turns.take(wait_s=wait_s, worker=runner.attempts.worker)
            if turn is not None:
                runner.run(turn.job_id)
        except redis.RedisError as error:  # the turn is lost, and the dispatcher's to feed
            _wait_while_refused(error)
            continue
        if turn is None and not quiet:
            when_quiet()
            quiet = True
        if runner.spoilt:
            return
        if turn is not None and _is_short_of_files():
            log.warning("jobs left many files open: another process takes the next job")
            return


class Notes:
    """What this process notes in Redis of itself."""

    def __init__(self, entries: DeviceEntries, mark: str) -> None:
        self._entries, self._mark = entries, mark
        self._entry = DeviceEntry()

    def note(self, **changes: Any) -> None:
        """Note something new, as soon as Redis takes it."""
        self._entry = self._entry.model_copy(update=changes)
        until_taken(partial(self._entries.write, self._mark, self._entry))

    def note_device(self, state: str, device: WarmDevice) -> None:
        """Note the device that was opened."""
        self.note(
            state=state,
            placement=device.placement,
            hardware=device.hardware,
            models=dict(device.models),
            unusable=dict(device.unusable),
            memory=device.memory(),
            building=None,
        )

    def measured(self, memory: DeviceMemory) -> None:
        """Note what is in the device's memory, unless Redis refuses."""
        self._entry = self._entry.model_copy(update={"memory": memory})
        with unless_refused():
            self._entries.write(self._mark, self._entry)


def until_taken(call: Callable[[], T]) -> T:
    """Call until Redis does not refuse only for now; return what the call returns."""
    while True:
        try:
            return call()
        except redis.RedisError as error:
            _wait_while_refused(error)


def _wait_while_refused(error: redis.RedisError) -> None:
    if not store_refuses(error):
        raise error
    log.warning("Redis refuses for now, waiting: %s", error)
    time.sleep(REFUSED_PAUSE_S)


def _beside(start: Start) -> Start:
    """Return how all models are tried beside a device: one at a time, on the CPU."""
    alone = replace(start.settings, device="cpu", model_memory_bytes=0, beside=True)
    return replace(start, settings=alone)


def _leave() -> NoReturn:
    """End the process with no tensor freed, see `Caught`."""
    logging.shutdown()
    os._exit(0)


def _is_short_of_files() -> bool:
    """Return whether half of the files are open that this process may have: models leave some."""
    try:
        num_open = len(os.listdir("/dev/fd"))
    except OSError as error:
        return error.errno == errno.EMFILE
    return num_open > resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2
