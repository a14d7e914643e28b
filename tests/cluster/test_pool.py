"""What the pool makes of leases that have ended, on real Ray."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.boxes import ROOT
from tests.cluster.conftest import ClusterBox
from tests.cluster.processes import wait_until
from tests.cluster.test_failures import long_job, when_in
from tests.cluster.test_jobs import num_ranges, shards


@pytest.mark.slow  # a process that joins the cluster
def test_a_lease_that_has_ended_has_no_device_and_takes_none_from_another(
    cluster: ClusterBox,
) -> None:
    with cluster.box.client() as client:
        wait_until(lambda: num_ranges(client) == 2, what="both devices")
        command = [sys.executable, "-m", "tests.cluster.leasing", str(cluster.box.data)]
        said = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
        assert json.loads(said.splitlines()[-1]) == {
            "devices": [2, 2],
            "pending": True,
            "answered": True,
            "given": False,
            "its_own": True,
            "ended": 0,
        }
        wait_until(lambda: num_ranges(client) == 2, what="both devices")


JOINING = """
import sys
from pathlib import Path
from gradbox_worker.cluster.head.address_file import ClusterAddress
from gradbox_worker.cluster.head.ray_environment import reach
path = Path(sys.argv[1], "cluster.json")
found = ClusterAddress.read(path)
reach(found.address, token=found.token)
from gradbox_worker.cluster.coordinator.joined import JoinedCluster
JoinedCluster(path)
"""


@pytest.mark.slow  # a process that joins the cluster
def test_a_coordinator_joins_while_all_devices_are_busy(cluster: ClusterBox) -> None:
    with cluster.box.client() as client:
        wait_until(lambda: num_ranges(client) == 2, what="both devices")
        job = client.submit(replace(long_job(devices=2), inputs=shards(4000)))
        when_in("forward", job)
        command = [sys.executable, "-c", JOINING, str(cluster.box.data)]
        subprocess.run(command, cwd=ROOT, check=True, timeout=60)
        assert job.refresh().state == "running"
        job.cancel()
        wait_until(lambda: num_ranges(client) == 2, what="both devices")


@pytest.mark.slow  # starts Ray, and devices of its own
def test_no_device_is_lost_that_failed_or_has_read_other_models(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.cluster.lending", str(tmp_path)]
    ended = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    assert json.loads(ended.stdout.splitlines()[-1]) == {
        "not made empty": 3,
        "changed meanwhile": 2,
        "began earlier": 3,
    }
    assert "failing cannot be made empty" in ended.stderr
    assert "is refused: expected model 'later'" in ended.stderr
