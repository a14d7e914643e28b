"""The coordinator: what a worker starts in place of a device process where there is a cluster.

It is told and answers what a device process is and does, see `gradbox_worker.device.main`. Ray is
imported only once the address file has said where the cluster is, for it reads its environment
then.
"""

from __future__ import annotations

import sys
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

from gradbox_worker.cluster.head.address_file import ClusterAddress
from gradbox_worker.cluster.head.ray_environment import reach
from gradbox_worker.device import main as device_main
from gradbox_worker.device.messages import Begin

if TYPE_CHECKING:
    from gradbox_worker.device import DeviceSettings
    from gradbox_worker.device.main import Inbox


def serve(connection: Connection, orders: Inbox, *, begin: Begin, settings: DeviceSettings) -> None:
    """Coordinate jobs on the cluster; see `serving.serve`."""
    assert settings.cluster is not None
    found = ClusterAddress.wait(settings.cluster)
    reach(found.address, token=found.token)
    from gradbox_worker.cluster.coordinator.serving import serve as serve_joined

    serve_joined(connection, orders, begin=begin, settings=settings)


if __name__ == "__main__":
    device_main.main(sys.argv[1:], serving="gradbox_worker.cluster.coordinator.main")
