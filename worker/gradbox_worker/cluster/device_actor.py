"""A device as an actor: has a `ClusterDevice` do what it is asked, in a process of its own.

The head, which makes the actors, knows this class and imports no torch; an actor's process imports
the device when it builds its models. Ray does not start one again that has ended, so a handle is
one process for its whole life.

Calls that compute run one after the other. What is asked and said of them runs beside them, in a
group of its own, and so do calls that hand rows over.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import ray

from gradbox_worker.cluster.shipping import lacking
from gradbox_worker.device.settings import DeviceSettings
from gradbox_worker.errors import JobStopped
from gradbox_worker.models.shipping import ShippedModels

CONTROL: Final = "control"
ROWS: Final = "rows"
WATCH: Final = "watch"
GROUPS: Final = {CONTROL: 1, ROWS: 1, WATCH: 1}


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

    A device that was made empty may have another job open by the time a call comes.
    """

    def method(self: DeviceActor, job: tuple[str, int], *arguments: Any) -> Any:
        if not self.device.holds(*job):
            raise JobStopped("the device is not open for this job")
        return getattr(self.device, name)(*arguments)

    method.__name__ = name
    return method


def _never_returns() -> Callable[..., Any]:
    """Return a method a reference to whose answer fails when the process ends."""

    def ends(self: DeviceActor) -> None:
        threading.Event().wait()

    found: Callable[..., Any] = ray.method(concurrency_group=WATCH)(ends)
    return found


class DeviceActor:
    """One device of a cluster; `head` makes an actor of it. See `ClusterDevice` for its methods."""

    def __init__(self, settings: DeviceSettings, name: str, mark: tuple[Path, str]) -> None:
        """Open nothing yet.

        Args:
            settings: of the device, without the models' entries.
            name: of the device.
            mark: a file in the box's data folder, and what stands in it; who reads that there sees
                the data folder.
        """
        self._settings, self._name, self._mark = settings, name, mark
        self.device: Any = None

    def lacks(self, shipped: ShippedModels) -> list[Path]:
        """Return which of the models' files this machine does not have."""
        return lacking(shipped)

    def build(
        self,
        shipped: ShippedModels | None,
        files: Mapping[Path, Any],
        known: Mapping[str, str],
        unusable: Mapping[str, str],
    ) -> Any:
        """Open the device and build its models, see `ClusterDevice`; returns what it has."""
        from gradbox_worker.cluster.device import ClusterDevice

        self.device = ClusterDevice(
            self._settings,
            self._name,
            self._mark,
            shipped=shipped,
            files=files,
            known=known,
            unusable=unusable,
        )
        return self.device.describe()

    import_for_jobs = _asks("import_for_jobs")
    run = _asks("run")
    read_result = _asks("read_result")
    open = _asks("open")
    forward = _asks_for_a_job("forward")
    resume = _asks_for_a_job("resume")
    replay = _asks_for_a_job("replay")
    check = _asks_for_a_job("check")
    take_sums = _asks_for_a_job("take_sums")
    add = _asks_for_a_job("add")
    count = _asks_for_a_job("count")
    smaller = _asks_for_a_job("smaller")
    run_samples = _asks_for_a_job("run_samples")
    factors = _asks_for_a_job("factors")
    gram = _asks_for_a_job("gram")
    empty = _asks("empty")
    rest = _asks("rest")
    take_rows = _asks("take_rows", group=ROWS)
    place_rows = _asks("place_rows", group=ROWS)
    news = _asks("news", group=CONTROL)
    holds = _asks("holds", group=CONTROL)
    stop = _asks("stop", group=CONTROL)
    stop_all = _asks("stop_all", group=CONTROL)
    ends = _never_returns()
