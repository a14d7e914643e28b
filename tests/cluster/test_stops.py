"""Jobs that are cancelled, or run out of time, in each of their phases: their devices are free."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from gradbox import GradClient, JobCancelled, JobTimedOut
from tests.cluster.conftest import ClusterBox
from tests.cluster.processes import wait_until
from tests.cluster.test_failures import when_in
from tests.cluster.test_failures_by_kind import JOBS
from tests.cluster.test_jobs import WAIT_S, num_ranges

pytestmark = pytest.mark.slow

PHASES = [
    ("packed, streams of samples", "forward"),
    ("packed, streams of samples", "replay"),
    ("mixed", "cotangents"),
    ("mixed", "replay"),
    ("a clipped sum", "samples"),
]


@pytest.fixture(scope="module")
def client(cluster: ClusterBox) -> Iterator[GradClient]:
    with cluster.box.client() as client:
        wait_until(lambda: num_ranges(client) == 2, what="both devices")
        yield client


@pytest.mark.parametrize(("name", "phase"), PHASES)
def test_a_job_that_is_cancelled_in_a_phase_frees_its_devices(
    client: GradClient, name: str, phase: str
) -> None:
    job = client.submit(JOBS[name](2))
    when_in(phase, job)
    job.cancel()
    with pytest.raises(JobCancelled):
        job.result(WAIT_S)
    wait_until(lambda: num_ranges(client) == 2, what="both devices")


@pytest.mark.parametrize("part", [0.15, 0.4])
@pytest.mark.parametrize("name", sorted({name for name, _ in PHASES}))
def test_a_job_whose_time_ends_on_the_way_frees_its_devices(
    client: GradClient, name: str, part: float
) -> None:
    seconds = client.submit(JOBS[name](2)).result(WAIT_S).manifest.seconds
    whole_s = seconds.forward + seconds.cotangents + seconds.replay + seconds.samples
    with pytest.raises(JobTimedOut):
        client.submit(JOBS[name](2, timeout_s=part * whole_s)).result(WAIT_S)
    wait_until(lambda: num_ranges(client) == 2, what="both devices")
