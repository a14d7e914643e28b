"""The device process's main loop, once torch is there."""

from __future__ import annotations

import logging
import os
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final, Protocol

import torch

from gradbox_service.store import blob_store
from gradbox_worker.computations.checkpoints import Pace
from gradbox_worker.computations.execution import StopNow, attempt
from gradbox_worker.computations.kept_graphs import KeptGraphs
from gradbox_worker.computations.memory import measure_device
from gradbox_worker.computations.memory_limit import MemoryLimit
from gradbox_worker.computations.placement import choose_device, hardware_name, memory_bytes
from gradbox_worker.device.importing import import_for_jobs
from gradbox_worker.device.messages import (
    Begin,
    Building,
    DeviceReady,
    DeviceUnready,
    MemoryMeasured,
    PhaseTimed,
    ProgressMade,
    Run,
    RunFailed,
    RunFinished,
    RunStopped,
    send,
)
from gradbox_worker.exceptions_to_problems import Caught, caught
from gradbox_worker.models import read_models_file
from gradbox_worker.models.registry import Registry
from gradbox_worker.work import Finished, Stopped, Work

REPORT_S: Final = 0.1
MEASURE_S: Final = 0.5


class Orders(Protocol):
    """What the worker asks for."""

    def next_run(self, within_s: float | None) -> Run | None: ...
    def stop_requested(self, job_id: str, attempt: int) -> bool: ...


def serve(
    connection: Connection,
    orders: Orders,
    *,
    begin: Begin,
    models_file: Path,
    data: Path,
    device_name: str,
    budget_bytes: int | None,
    result_memory_bytes: int | None,
    job_memory_bytes: int | None,
    checkpoint_after_s: float | None,
) -> None:
    """Build the models that the worker does not know, then run jobs until one spoils the device.

    The process ends elsewhere, when the worker closes the pipe.

    Args:
        begin: the worker's first message.
    """

    def load() -> Registry:
        device = choose_device(device_name)
        if device.type == "cuda":
            torch.cuda.set_device(device)  # for models that say "cuda" and mean theirs
        budget = memory_bytes(device) // 2 if budget_bytes is None else budget_bytes
        registry = Registry(
            read_models_file(models_file),
            device=device,
            budget_bytes=budget,
            versions=begin.known,
            unusable=begin.unusable,
            limit=MemoryLimit(device).held,
        )
        described = registry.describe(
            before=lambda name: send(connection, Building(model=name)),
        )
        ready = DeviceReady(
            models=described,
            placement=str(device),
            hardware=hardware_name(device),
            memory=measure_device(device, models=registry.sizes_bytes()),
        )
        send(connection, ready)
        return registry

    registry = caught(load, doing="the device process's start", let_through=OSError)
    if isinstance(registry, Caught):
        send(connection, DeviceUnready(problem=registry.problem))
        return
    import_for_jobs()
    blobs, kept = blob_store(data), KeptGraphs()
    limit = MemoryLimit(registry.device, job_bytes=job_memory_bytes)
    pace = None if checkpoint_after_s is None else Pace.after(checkpoint_after_s)
    gauge = _Gauge(connection, registry)
    while True:
        order = orders.next_run(kept.idle_left_s())
        if order is None:
            kept.drop()
            continue
        work = _work(order)
        gauge.begin()
        observer = _Reporter(connection, orders, work=work, gauge=gauge)
        answer = attempt(
            work,
            registry=registry,
            blobs=blobs,
            kept=kept,
            observer=observer,
            result_memory_bytes=result_memory_bytes,
            limit=limit,
            pace=pace,
            phase_ended=observer.phase_ended if work.timed else None,
        )
        gauge.end()
        match answer:
            case Finished():
                send(connection, RunFinished(receipt=answer.receipt, result=answer.result))
            case Stopped():
                send(connection, RunStopped())
            case Caught():
                send(connection, RunFailed(problem=answer.problem, leaving=answer.spoilt))
                if answer.spoilt:
                    logging.shutdown()
                    os._exit(0)  # with no tensor freed, see `Caught`


class _Gauge:
    """Sends what is in the device's memory, now and then."""

    def __init__(self, connection: Connection, registry: Registry) -> None:
        self._connection = connection
        self._registry = registry
        self._before_bytes = 0
        self._sent_at = 0.0
        self._job_is_shown = False
        self._sent_models = registry.sizes_bytes()  # with the message that the device is ready

    def begin(self) -> None:
        """A job begins; what memory holds now is not its own."""
        self._before_bytes = measure_device(self._registry.device, models={}).used_bytes

    def step(self) -> None:
        """Measure, if that was not done a moment ago."""
        if time.monotonic() - self._sent_at >= MEASURE_S:
            self._send(before_bytes=self._before_bytes)

    def end(self) -> None:
        """The job has ended: measure without it, unless nobody heard of it and no model moved."""
        moved = self._registry.sizes_bytes() != self._sent_models
        if moved or self._job_is_shown or time.monotonic() - self._sent_at >= MEASURE_S:
            self._send(before_bytes=None)

    def _send(self, *, before_bytes: int | None) -> None:
        self._sent_at, self._job_is_shown = time.monotonic(), before_bytes is not None
        self._sent_models = self._registry.sizes_bytes()
        memory = measure_device(
            self._registry.device, models=self._sent_models, before_bytes=before_bytes
        )
        send(self._connection, MemoryMeasured(memory=memory))


class _Reporter:
    """The engine's observer: sends progress now and then, and stops the job on request."""

    def __init__(
        self, connection: Connection, orders: Orders, *, work: Work, gauge: _Gauge
    ) -> None:
        self._connection = connection
        self._orders = orders
        self._work = work
        self._gauge = gauge
        self._phase = ""
        self._reported_at = 0.0

    def step(self, phase: str, done: int, total: int) -> None:
        if self._orders.stop_requested(self._work.job_id, self._work.attempt):
            raise StopNow
        self._gauge.step()
        now = time.monotonic()
        if phase == self._phase and now - self._reported_at < REPORT_S:
            return
        self._phase, self._reported_at = phase, now
        send(self._connection, ProgressMade(phase=phase, done=done, total=total))

    def phase_ended(self, phase: str, *, began_s: float, ended_s: float) -> None:
        send(self._connection, PhaseTimed(phase=phase, began_s=began_s, ended_s=ended_s))


def _work(order: Run) -> Work:
    return Work(
        job_id=order.job_id,
        attempt=order.attempt,
        model=order.model,
        model_version=order.model_version,
        spec=order.spec,
        result_path=order.result_path,
        earlier_result=order.earlier_result,
        queued_s=order.queued_s,
        disk_reserve_bytes=order.disk_reserve_bytes,
        timed=order.timed,
    )
