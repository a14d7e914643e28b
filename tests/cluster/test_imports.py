"""Ray is imported where there is a cluster, and nowhere else."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    "modules",
    [
        "gradbox, gradbox.cli",
        "gradbox_service.commands, gradbox_service.up.command, gradbox_service.up.box",
        "gradbox_worker.command, gradbox_worker.turns.rq_worker, gradbox_worker.device",
        "gradbox_worker.device.main, gradbox_worker.device.serving",
        "gradbox_worker.cluster.main, gradbox_worker.cluster.leases",
    ],
)
def test_nothing_imports_ray_without_a_cluster(modules: str) -> None:
    code = f"import sys, {modules}\nassert 'ray' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
