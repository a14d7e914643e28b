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
from gradbox_worker.cluster.head.leases import Lent, Wish
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
    tell = partial(send, connection)
    path = settings.cluster
    cluster = caught(
        lambda: JoinedCluster(path, reloads=begin.reloads),
        doing="joining the cluster",
        let_through=OSError,
        explain=lambda error: JobFailed(str(error)) if isinstance(error, WorkerError) else None,
    )
    if isinstance(cluster, Caught):
        tell(DeviceUnready(problem=cluster.problem))
        return
    known = begin.known.keys() | begin.unusable.keys()
    views = [view for name, view in cluster.views.items() if name not in known]
    tell(DeviceReady(models=views, placement="cluster", hardware=cluster.hardware))
    import_for_jobs()
    while True:
        work = orders.next_run(None)
        if work is None:
            continue
        stop_requested = partial(orders.stop_requested, work.job_id, work.attempt)
        coordinator = Coordinator(cluster, settings, tell=tell, stop_requested=stop_requested)
        try:
            tell(coordinator.run(work))
        except ClusterGone as error:
            log.warning("job %s: %s", work.job_id, error)
            begun = coordinator.begun
            tell(RunLost(reason="the head of the cluster ended", leaving=True, begun=begun))
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
        tell: Callable[[FromDevice], None],
        stop_requested: Callable[[], bool],
    ) -> None:
        self._cluster, self._settings = cluster, settings
        self._tell, self._stop_requested = tell, stop_requested
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
        wish = Wish(
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
                lent = self._leased(wish)
                self.begun = True
                try:
                    found = self._run_on(work, lent, wish, waiting)
                    at_rest = len(lent) == 1 and isinstance(found, RunFinished)
                    return found
                except DiedBefore:
                    self.begun = False
        except StopNow:
            return RunStopped()
        finally:
            self._cluster.end(wish.lease, at_rest=at_rest)

    def _leased(self, wish: Wish) -> list[Lent]:
        """Return one device, or several of those that live: one may have died while it was idle."""
        while True:
            lent = self._cluster.lease(wish, while_waiting=self._check)
            if len(lent) == 1:
                return lent  # `run_whole` asks, and `WideJob`
            calls = [device.actor.news.remote() for device in lent]
            living = [one for one, call in zip(lent, calls, strict=True) if answered(call)]
            for device in lent:
                if device not in living:
                    self._cluster.give_back(device)
            if living:
                return living

    def _run_on(
        self, work: Work, lent: list[Lent], wish: Wish, waiting: WaitingGraphs | None
    ) -> Outcome:
        """Run a job in ranges, or whole on a single device that sees the box's files.

        A single device that does not see them has the job as its one range.
        """
        in_ranges = waiting is not None and len(waiting.ranges) > 0
        if lent[0].sees_files and len(lent) == 1 and not in_ranges:
            return run_whole(
                work, lent[0], self._cluster, tell=self._tell, stop_requested=self._stop_requested
            )
        job = WideJob(
            work,
            self._cluster,
            lent,
            wish=wish,
            waiting=waiting,
            settings=self._settings,
            tell=self._tell,
            stop_requested=self._stop_requested,
        )
        found = self._run_wide(work, job)
        if not isinstance(found, CoupledShards):
            return found
        if not job.lent:
            raise DiedBefore
        one, *others = sorted(job.lent, key=lambda device: not device.sees_files)
        for device in others:
            self._cluster.give_back(device)
        return self._run_on(replace(work, not_split=str(found)), [one], wish, None)

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
