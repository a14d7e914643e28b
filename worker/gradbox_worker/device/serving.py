"""The device process's main loop, once torch is there."""

from __future__ import annotations

import errno
import logging
import os
import resource
from functools import partial
from multiprocessing.connection import Connection
from typing import NoReturn, Protocol

from gradbox_worker.device.child import DeviceSettings
from gradbox_worker.device.importing import import_for_jobs
from gradbox_worker.device.messages import (
    Begin,
    Building,
    DeviceReady,
    DeviceUnready,
    RunFailed,
    RunLost,
    send,
)
from gradbox_worker.device.warm_device import WarmDevice
from gradbox_worker.exceptions_to_problems import Caught, caught
from gradbox_worker.work import Work

log = logging.getLogger(__name__)


class Orders(Protocol):
    """What the worker asks for."""

    def next_run(self, within_s: float | None) -> Work | None: ...
    def stop_requested(self, job_id: str, attempt: int) -> bool: ...


def serve(
    connection: Connection, orders: Orders, *, begin: Begin, settings: DeviceSettings
) -> None:
    """Build the models that the worker does not know, then run jobs until one spoils the device.

    The process ends elsewhere, when the worker closes the pipe.

    Args:
        begin: the worker's first message.
    """
    report = partial(send, connection)

    def open_device() -> WarmDevice:
        device = WarmDevice(
            settings,
            report=report,
            known=begin.known,
            unusable=begin.unusable,
            before_building=lambda name: report(Building(model=name)),
        )
        ready = DeviceReady(
            models=device.views,
            placement=device.placement,
            hardware=device.hardware,
            memory=device.memory(),
        )
        report(ready)
        return device

    device = caught(open_device, doing="the device process's start", let_through=OSError)
    if isinstance(device, Caught):
        report(DeviceUnready(problem=device.problem))
        return
    import_for_jobs()
    has_run = False
    while True:
        work = orders.next_run(device.kept.idle_left_s())
        if work is None:
            device.kept.drop()
            continue
        if has_run and _is_short_of_files():
            log.warning("jobs left many files open: another process takes job %s", work.job_id)
            report(RunLost(reason="it was short of files", leaving=True, begun=False))
            _leave()
        has_run = True
        stop_requested = partial(orders.stop_requested, work.job_id, work.attempt)
        answer = device.run(work, stop_requested=stop_requested)
        report(answer)
        if isinstance(answer, RunFailed) and answer.leaving:
            _leave()


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
