"""A device as an actor: a `ClusterDevice` in a process of its own.

The head, which makes the actors, knows this class and imports no torch; an actor's process imports
the device when it builds its models. Ray does not start one again that has ended, so a handle is
one process for its whole life.

Calls that compute run one after the other. What is asked and said of them runs beside them, in a
group of its own, and so do calls of helpers that hand rows to their leader.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any, Final

import ray

from gradbox_worker.cluster.shipping import lacking
from gradbox_worker.models.shipping import ShippedModels

CONTROL: Final = "control"
ROWS: Final = "rows"
WATCH: Final = "watch"
GROUPS: Final = {CONTROL: 1, ROWS: 4, WATCH: 1}  # threads


class DeviceActor:
    """One device of a cluster; `head` makes an actor of it. See `ClusterDevice` for its methods."""

    device: Any

    def lacks(self, shipped: ShippedModels) -> list[Path]:
        """Return which of the models' files this machine does not have."""
        return lacking(shipped)

    def build(self, *arguments: Any, **given: Any) -> Any:
        """Open the device and build its models, see `ClusterDevice`; returns what it has."""
        from gradbox_worker.cluster.device import ClusterDevice

        self.device = ClusterDevice(*arguments, **given)
        return self.device.describe()

    def compute(self, method: str, *arguments: Any) -> Any:
        """Have the device do something, after what it was asked to compute before."""
        return getattr(self.device, method)(*arguments)

    def _control(self, method: str, *arguments: Any) -> Any:
        """Have it do something at once, beside what it computes."""
        return getattr(self.device, method)(*arguments)

    def _rows(self, method: str, *arguments: Any) -> Any:
        """Have it take the dense rows of a helper, beside what it computes."""
        return getattr(self.device, method)(*arguments)

    def _ends(self) -> None:
        """Never return: a reference to the answer fails when the process ends."""
        threading.Event().wait()

    # Ray's decorator has no types.
    control: Any = ray.method(concurrency_group=CONTROL)(_control)
    rows: Any = ray.method(concurrency_group=ROWS)(_rows)
    ends: Any = ray.method(concurrency_group=WATCH)(_ends)
