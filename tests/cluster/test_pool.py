"""What the pool makes of leases that have ended, on real Ray."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

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


@pytest.mark.slow  # starts Ray, and devices of its own
def test_no_device_is_lost_that_failed_or_has_read_other_models(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.cluster.lending", str(tmp_path)]
    said = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    assert json.loads(said.splitlines()[-1]) == {
        "not made empty": 3,
        "changed meanwhile": 2,
        "began earlier": 3,
    }
