"""A job that one device runs, as a device process would: the coordinator hands on what it says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import ray
from ray.exceptions import RayActorError

from gradbox_worker.cluster.coordinator.joined import POLL_S, JoinedCluster
from gradbox_worker.cluster.exchange.messages import (
    FROM_DEVICE,
    FromDevice,
    Run,
    RunFailed,
    RunFinished,
    RunLost,
    RunStopped,
)
from gradbox_worker.cluster.head.leases import LeasedDevice
from gradbox_worker.work import Work

Outcome = RunFinished | RunFailed | RunStopped | RunLost

DEVICE_ENDED: Final = "the process of its device in the cluster ended"


class DiedBefore(Exception):
    """The device had died before it was asked to run the job."""


def run_whole(
    work: Work,
    leased: LeasedDevice,
    cluster: JoinedCluster,
    *,
    report: Callable[[FromDevice], None],
    stop_requested: Callable[[], bool],
) -> Outcome:
    """Have a device run a job to its end.

    Args:
        report: hears what the device says meanwhile.
        stop_requested: asked every 0.2 s.

    Raises:
        DiedBefore: another device is to run it.
        ClusterGone: the head of the cluster ended.
    """
    lived = leased.actor.news.remote()  # nobody waits for it unless the device is lost
    answer = leased.actor.run.remote(Run(work=work).model_dump_json())
    told_to_stop = False
    try:
        while not ray.wait([answer], timeout=POLL_S)[0]:
            cluster.check()
            if stop_requested() and not told_to_stop:
                told_to_stop = True
                leased.actor.stop.remote(work.job_id, work.attempt)
            _hand_on(ray.get(leased.actor.news.remote()), report)
        *news, outcome = ray.get(answer)
    except RayActorError:
        cluster.check()
        cluster.give_back(leased)
        if not answered(lived):
            raise DiedBefore from None
        return RunStopped() if told_to_stop else RunLost(reason=DEVICE_ENDED, fault=DEVICE_ENDED)
    _hand_on([*ray.get(lived), *news], report)
    found: Any = FROM_DEVICE.validate_json(outcome)
    if isinstance(found, RunFailed) and found.leaving:
        cluster.give_back(leased)
        return found.model_copy(update={"leaving": False})  # this process goes on
    assert isinstance(found, Outcome)
    return found


def answered(call: Any) -> bool:
    """Wait for a call of a device, and return whether it lived to answer."""
    try:
        ray.get(call)
    except RayActorError:
        return False
    return True


def _hand_on(frames: list[str], report: Callable[[FromDevice], None]) -> None:
    for frame in frames:
        report(FROM_DEVICE.validate_json(frame))
