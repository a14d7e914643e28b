"""A device as an actor: has a `ClusterDevice` do what it is asked, in a process of its own.

The head, which makes the actors, knows this class and imports no torch; an actor's process imports
the device when it begins. Calls that compute run one after the other. What is asked and told of
them runs beside them, in a group of its own, and so do calls that hand rows over.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import ray

from gradbox_worker.device.settings import DeviceSettings
from gradbox_worker.errors import JobStopped

CONTROL: Final = "control"
ROWS: Final = "rows"


def _asks(name: str, *, group: str | None = None) -> Callable[..., Any]:
    """Return a method that asks the device the same.

    Args:
        group: beside whose calls it runs; None: the computing ones.
    """

    def method(self: DeviceActor, *arguments: Any) -> Any:
        return getattr(self.device, name)(*arguments)

    method.__name__ = name
    return method if group is None else ray.method(concurrency_group=group)(method)


def _asks_for_a_job(name: str) -> Callable[..., Any]:
    """Return a method that asks the device the same for one attempt at a job, its first argument.

    A device that died, or was given back, may have another job open by the time a call comes.
    """

    def method(self: DeviceActor, job: tuple[str, int], *arguments: Any) -> Any:
        if not self.device.holds(*job):
            raise JobStopped("the device is not open for this job")
        return getattr(self.device, name)(*arguments)

    method.__name__ = name
    return method


class DeviceActor:
    """One device of a cluster; `head` makes an actor of it. See `ClusterDevice` for its methods."""

    def __init__(
        self, settings: DeviceSettings, mark: tuple[Path, str], models: str | None
    ) -> None:
        """Open the device, see there."""
        from gradbox_worker.cluster.actor.cluster_device import ClusterDevice

        self.device = ClusterDevice(settings, mark, models)

    import_for_jobs = _asks("import_for_jobs")
    run = _asks("run")
    open = _asks("open")
    forward = _asks_for_a_job("forward")
    resume = _asks_for_a_job("resume")
    replay = _asks_for_a_job("replay")
    check = _asks_for_a_job("check")
    take_sums = _asks_for_a_job("take_sums")
    add = _asks_for_a_job("add")
    stored_sums = _asks_for_a_job("stored_sums")
    write_sums = _asks_for_a_job("write_sums")
    count = _asks_for_a_job("count")
    smaller = _asks_for_a_job("smaller")
    run_samples = _asks_for_a_job("run_samples")
    factors = _asks_for_a_job("factors")
    gram = _asks_for_a_job("gram")
    empty = _asks("empty")
    drop_idle_graphs = _asks("drop_idle_graphs")
    take_rows = _asks("take_rows", group=ROWS)
    place_rows = _asks("place_rows", group=ROWS)
    describe = _asks("describe", group=CONTROL)
    news = _asks("news", group=CONTROL)
    holds = _asks("holds", group=CONTROL)
    stop = _asks("stop", group=CONTROL)
    stop_all = _asks("stop_all", group=CONTROL)
