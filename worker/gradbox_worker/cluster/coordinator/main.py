"""The coordinator: what a worker starts in place of a device process where there is a cluster.

It takes turns as a device process does, see `gradbox_worker.turns.main`, and has devices of the
cluster run the jobs. Ray is imported only once the address file has said where the cluster is, for
it reads its environment then.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from gradbox.protocol import DeviceMemory
from gradbox_worker.cluster.head.address_file import ClusterAddress
from gradbox_worker.cluster.head.ray_environment import reach
from gradbox_worker.device.settings import CLUSTER_MODULE, Start
from gradbox_worker.turns import main as turns_main

if TYPE_CHECKING:
    from gradbox_worker.cluster.coordinator.serving import CoordinatingDevice


def open_device(
    start: Start,
    *,
    before_building: Callable[[str], None],
    measured: Callable[[DeviceMemory], None],
) -> CoordinatingDevice:
    """Join the cluster; see `gradbox_worker.turns.serving.Opening`."""
    settings = start.settings
    assert settings.cluster is not None
    found = ClusterAddress.wait(settings.cluster)
    reach(found.address, token=found.token)
    from gradbox_worker.cluster.coordinator.serving import CoordinatingDevice

    return CoordinatingDevice(start, measured=measured)


if __name__ == "__main__":
    turns_main.main(opening=CLUSTER_MODULE)
