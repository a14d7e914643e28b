"""What is said of a job on several devices before it runs."""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.box.estimates import WITHIN, Compared
from gradbox import Gradient, Jacobian
from tests.cluster.conftest import ClusterBox


def squares(z: Tensor) -> Tensor:
    return z.square().mean()


def test_an_estimate_on_two_devices_is_near_the_receipt(cluster: ClusterBox) -> None:
    shards = [torch.randn(64, 5, dtype=torch.float64) for _ in range(8)]
    jobs = {
        "gradient": Gradient(model="unhurried", inputs=shards, loss=squares, devices=2, retain=0),
        "rows": Jacobian(model="unhurried", inputs=shards, form="dense", devices=2),
    }
    with cluster.box.client() as client:
        for name, job in jobs.items():
            estimate = client.estimate(job)
            result = client.run(job)
            assert len(result.manifest.ranges or ()) == 2
            found = Compared.of(name, estimate, result)
            assert abs(found.off["peak"]) <= WITHIN, found
            assert abs(found.off["result"]) <= WITHIN, found
