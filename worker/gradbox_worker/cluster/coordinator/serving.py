"""The coordinator's main loop: a device process that has the devices of a cluster run its jobs."""

from __future__ import annotations

import logging
import os
import signal
import uuid
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from typing import Final

from gradbox.errors import JobFailed
from gradbox_engine.errors import CoupledShards
from gradbox_worker.cluster.coordinator.joined import ClusterGone, JoinedCluster
from gradbox_worker.cluster.coordinator.waiting_graphs import WaitingGraphs
from gradbox_worker.cluster.coordinator.whole_job import DiedBefore, Outcome, answered, run_whole
from gradbox_worker.cluster.coordinator.wide_job import WideJob, can_be_split
from gradbox_worker.cluster.head.leases import LeasedDevice, LeaseRequest
from gradbox_worker.computations.execution import StopNow
from gradbox_worker.device.child import DeviceSettings
from gradbox_worker.device.importing import import_for_jobs
from gradbox_worker.device.messages import (
    Begin,
    DeviceReady,
    DeviceUnready,
    FromDevice,
    RunFailed,
    RunFinished,
    RunLost,
    RunStopped,
    send,
)
from gradbox_worker.device.serving import Orders
from gradbox_worker.errors import WorkerError
from gradbox_worker.exceptions_to_problems import Caught, caught
from gradbox_worker.work import Work

log = logging.getLogger(__name__)

AUTO: Final = "auto"
# What a lease asks for that takes all that is idle.
ALL: Final = 2**31


def serve(
    connection: Connection, orders: Orders, *, begin: Begin, settings: DeviceSettings
) -> None:
    """Join the cluster, then coordinate one job after the other.

    The process ends elsewhere, when the worker closes the pipe; or here, when the head of the
    cluster has ended, so that the next one joins the new one.

    Args:
        begin: the worker's first message.
    """
    assert settings.cluster is not None
    report = partial(send, connection)
    path = settings.cluster
    cluster = caught(
        lambda: JoinedCluster(path, reloads=begin.reloads),
        doing="joining the cluster",
        let_through=OSError,
        explain=lambda error: JobFailed(str(error)) if isinstance(error, WorkerError) else None,
    )
    if isinstance(cluster, Caught):
        report(DeviceUnready(problem=cluster.problem))
        return
    known = begin.known.keys() | begin.unusable.keys()
    views = [view for name, view in cluster.views.items() if name not in known]
    report(DeviceReady(models=views, placement="cluster", hardware=cluster.hardware))
    import_for_jobs()
    while True:
        work = orders.next_run(None)
        if work is None:
            continue
        stop_requested = partial(orders.stop_requested, work.job_id, work.attempt)
        coordinator = Coordinator(cluster, settings, report=report, stop_requested=stop_requested)
        try:
            report(coordinator.run(work))
        except ClusterGone as error:
            log.warning("job %s: %s", work.job_id, error)
            begun = coordinator.begun
            report(RunLost(reason="the head of the cluster ended", leaving=True, begun=begun))
            os.kill(os.getpid(), signal.SIGKILL)  # Ray's shutdown would wait for the dead head


class Coordinator:
    """Has the devices of a cluster run one job.

    Attributes:
        begun: whether a device was asked to run it.
    """

    def __init__(
        self,
        cluster: JoinedCluster,
        settings: DeviceSettings,
        *,
        report: Callable[[FromDevice], None],
        stop_requested: Callable[[], bool],
    ) -> None:
        self._cluster, self._settings = cluster, settings
        self._report, self._stop_requested = report, stop_requested
        self.begun = False

    def run(self, work: Work) -> Outcome:
        """Run a job to its end.

        Raises:
            ClusterGone: the head of the cluster ended.
        """
        devices = work.spec.devices if can_be_split(work.spec) else 1
        at_most = ALL if devices == AUTO else devices
        waiting = WaitingGraphs.of(work.spec, work.earlier_result)
        if waiting is not None and len(waiting.ranges) > at_most:
            waiting = None  # it may not have so many devices
        request = LeaseRequest(
            uuid.uuid4().hex,
            work.model,
            at_most=at_most if waiting is None else waiting.num_devices,
            with_files=at_most == 1,
            job=str(work.result_path),
            follows="" if waiting is None else waiting.job,
        )
        at_rest = False
        try:
            while True:
                leased = self._leased(request)
                self.begun = True
                try:
                    found = self._run_on(work, leased, request, waiting)
                    at_rest = len(leased) == 1 and isinstance(found, RunFinished)
                    return found
                except DiedBefore:
                    self.begun = False
        except StopNow:
            return RunStopped()
        finally:
            self._cluster.end(request.lease, at_rest=at_rest)

    def _leased(self, request: LeaseRequest) -> list[LeasedDevice]:
        """Return one device, or several of those that live: one may have died while it was idle."""
        while True:
            leased = self._cluster.lease(request, while_waiting=self._check)
            if len(leased) == 1:
                return leased  # `run_whole` asks, and `WideJob`
            calls = [device.actor.news.remote() for device in leased]
            living = [one for one, call in zip(leased, calls, strict=True) if answered(call)]
            for device in leased:
                if device not in living:
                    self._cluster.give_back(device)
            if living:
                return living

    def _run_on(
        self,
        work: Work,
        leased: list[LeasedDevice],
        request: LeaseRequest,
        waiting: WaitingGraphs | None,
    ) -> Outcome:
        """Run a job in ranges, or whole on a single device that sees the box's files.

        A single device that does not see them has the job as its one range.
        """
        in_ranges = waiting is not None and len(waiting.ranges) > 0
        if leased[0].sees_files and len(leased) == 1 and not in_ranges:
            return run_whole(
                work,
                leased[0],
                self._cluster,
                report=self._report,
                stop_requested=self._stop_requested,
            )
        job = WideJob(
            work,
            self._cluster,
            leased,
            request=request,
            waiting=waiting,
            settings=self._settings,
            report=self._report,
            stop_requested=self._stop_requested,
        )
        found = self._run_wide(work, job)
        if not isinstance(found, CoupledShards):
            return found
        if not job.leased:
            raise DiedBefore
        one, *others = sorted(job.leased, key=lambda device: not device.sees_files)
        for device in others:
            self._cluster.give_back(device)
        return self._run_on(replace(work, not_split=str(found)), [one], request, None)

    def _check(self) -> None:
        if self._stop_requested():
            raise StopNow

    def _run_wide(self, work: Work, job: WideJob) -> Outcome | CoupledShards:
        """Run a job in ranges, unless its shards are coupled and "auto" leaves it to one device.

        Raises:
            StopNow: the job was told to stop.
            ClusterGone: the head of the cluster ended.
        """
        may_be_whole = work.spec.devices == AUTO and not work.not_split
        coupled = (CoupledShards,) if may_be_whole else ()
        try:
            found = caught(
                job.run,
                doing=f"job {work.job_id}",
                let_through=(StopNow, ClusterGone, *coupled),
            )
        except CoupledShards as error:
            log.info("job %s runs on one device: %s", work.job_id, error)
            return error
        return RunFailed(problem=found.problem) if isinstance(found, Caught) else found
