"""A coordinator that leases devices and runs nothing: `python -m tests.cluster.leasing DATA`.

Prints as JSON what became of leases that ended, and of devices that were given back.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from gradbox_worker.cluster.head.address_file import NAME, ClusterAddress
from gradbox_worker.cluster.head.leases import LeaseRequest
from gradbox_worker.cluster.head.ray_environment import reach

WAIT_S = 5.0


def main(data: Path) -> dict[str, Any]:
    found = ClusterAddress.read(data / NAME)
    reach(found.address, token=found.token)
    import ray

    from gradbox import Gradient
    from gradbox_engine.ranges import Range
    from gradbox_worker.cluster.coordinator.joined import JoinedCluster
    from gradbox_worker.cluster.coordinator.open_devices import OpenDevices
    from gradbox_worker.cluster.head.pool import POOL
    from tests.cluster.test_restarted_device import SHARDS, range_job

    cluster = JoinedCluster(data / NAME)
    pool = ray.get_actor(POOL)

    def leased(request: LeaseRequest) -> list[Any]:
        return cluster.lease(request, while_waiting=cluster.check)

    first = leased(LeaseRequest("first", "", at_most=2))
    waits = pool.lease.remote(LeaseRequest("waits", ""), os.getpid())
    pending = not ray.wait([waits], timeout=WAIT_S / 5)[0]
    cluster.end("waits")
    answered = bool(ray.wait([waits], timeout=WAIT_S)[0])
    cluster.end("first")
    second = leased(LeaseRequest("second", "", at_most=2))
    for device in first:
        cluster.give_back(device)  # once more, for `end` did
    others = pool.lease.remote(LeaseRequest("others", ""), os.getpid())
    given = bool(ray.wait([others], timeout=WAIT_S / 2)[0])
    cluster.end("others")
    cluster.end("second")
    request = LeaseRequest("third", "", at_most=2)
    job = Gradient(model="mlp", inputs=SHARDS, loss=lambda z: z.sum())
    devices = OpenDevices(
        cluster,
        leased(request),
        request=request,
        job=ray.put(range_job(job, cluster.views)),
        job_key=("job", 1),
        groups=(),
        homes={},
        while_waiting=cluster.check,
    )
    parts = [Range(index, 2, index, index + 1) for index in range(2)]
    for part in parts:
        devices.take(part)
    devices.give_back_if_empty(devices.take(parts[1]))
    its_own = devices.take(parts[1]) in devices.alive
    cluster.end("third")
    return {
        "devices": [len(first), len(second)],
        "pending": pending,
        "answered": answered,
        "given": given,
        "its_own": its_own,
        "ended": len(cluster.more(LeaseRequest("third", ""))),
    }


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]))))
