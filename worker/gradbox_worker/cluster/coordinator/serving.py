"""The coordinator's device: one job after the other, run by devices of a cluster."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable
from dataclasses import replace
from typing import Final

from gradbox.protocol import DeviceMemory, names_in
from gradbox_engine.errors import CoupledShards
from gradbox_service.database.connection import connect
from gradbox_service.store import blob_store
from gradbox_worker import work as work_outcomes
from gradbox_worker.cluster.coordinator.joined import ClusterGone, JoinedCluster
from gradbox_worker.cluster.coordinator.waiting_graphs import WaitingGraphs
from gradbox_worker.cluster.coordinator.whole_job import DiedBefore, Outcome, answered, run_whole
from gradbox_worker.cluster.coordinator.wide_job import WideJob, can_be_split
from gradbox_worker.cluster.exchange.messages import (
    FromDevice,
    MemoryMeasured,
    PhaseTimed,
    ProgressMade,
    RunFailed,
    RunFinished,
    RunLost,
    RunStopped,
)
from gradbox_worker.cluster.head.leases import LeasedDevice, LeaseRequest
from gradbox_worker.computations.execution import StopNow
from gradbox_worker.device.exits import Exit, died
from gradbox_worker.device.last_step import JobStep
from gradbox_worker.device.settings import DeviceSettings, Start
from gradbox_worker.exceptions_to_problems import Caught, caught
from gradbox_worker.work import Supervision, Work

log = logging.getLogger(__name__)

AUTO: Final = "auto"
# What a lease asks for that takes all that is idle.
ALL: Final = 2**31


class CoordinatingDevice:
    """Implements `turns.serving.Served` by the devices of a cluster.

    Attributes:
        models: the versions of the models, by name.
        unusable: why others cannot be built.
        views: those that the worker did not know.
        placement: what the worker says that its device is.
        hardware: what the first device calls itself.
    """

    def __init__(self, start: Start, *, measured: Callable[[DeviceMemory], None]) -> None:
        """Join the cluster.

        Args:
            measured: hears what is in the memory of the device that runs a job.

        Raises:
            DeviceNotStarted: there is none, or it cannot be joined.
        """
        self._settings, self._measured = start.settings, measured
        connection = connect(start.turns.redis_url)
        self._blobs = blob_store(start.settings.data, connection=connection)
        path = start.settings.cluster
        assert path is not None
        self._cluster = JoinedCluster(path, reloads=start.reloads)
        views = self._cluster.views.values()
        self.models = {view.name: view.version for view in views if view.usable}
        self.unusable = {view.name: view.reason for view in views if not view.usable}
        self.views = [view for view in views if view.name not in start.known]
        self.placement = "cluster"
        self.hardware = self._cluster.hardware

    def memory(self) -> DeviceMemory | None:
        """Return nothing: the memory is that of many devices."""
        return None

    def rest(self) -> float | None:
        """Do nothing: the pool frees what waits on its devices."""
        return None

    def run(self, work: Work, supervision: Supervision) -> work_outcomes.Outcome:
        """Have devices of the cluster run a job to its end."""
        for name in names_in(work.spec):  # the devices see the folder, and not Redis
            self._blobs.on_disk(name)
        step: JobStep | None = None

        def report(frame: FromDevice) -> None:
            nonlocal step
            match frame:
                case ProgressMade():
                    step = JobStep(frame.phase, frame.done, frame.total)
                    supervision.progress(*step)
                case PhaseTimed():
                    supervision.phase_ended(
                        frame.phase, began_s=frame.began_s, ended_s=frame.ended_s
                    )
                case MemoryMeasured():
                    self._measured(frame.memory)

        coordinator = Coordinator(
            self._cluster,
            self._settings,
            report=report,
            stop_requested=supervision.stop_requested,
        )
        try:
            answer = coordinator.run(work)
        except ClusterGone as error:
            log.warning("job %s: %s", work.job_id, error)
            if not coordinator.begun:
                return work_outcomes.Stopped(leaving=True)
            return work_outcomes.Died("the head of the cluster ended", leaving=True)
        match answer:
            case RunFinished():
                return work_outcomes.Finished(answer.result)
            case RunFailed():
                return work_outcomes.Failed(answer.problem)
            case RunStopped():
                return work_outcomes.Stopped()
            case RunLost():
                return died(Exit(answer.reason, fault=answer.fault), step)


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
