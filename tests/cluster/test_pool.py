"""What the pool makes of leases that have ended, on real Ray."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.boxes import ROOT
from tests.cluster.conftest import ClusterBox
from tests.cluster.processes import wait_until
from tests.cluster.test_jobs import num_ranges


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
