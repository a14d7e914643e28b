"""What dies while a job runs, and that the job's result is the same."""

from __future__ import annotations

import pytest
import torch

from gradbox import GradClient, Gradient, GradResult, Jacobian, Job
from tests.cluster.conftest import ClusterBox
from tests.cluster.processes import kill, parent, running, wait_until
from tests.cluster.test_jobs import WAIT_S, num_ranges, shards, sum_of_squares
from tests.oracle import TOLERANCE, difference

ACTOR = "ray::DeviceActor"
COORDINATOR = "gradbox_worker.cluster.main"
RAYLET = "raylet/raylet"


@pytest.fixture(scope="module")
def client(cluster: ClusterBox) -> GradClient:
    with cluster.box.client() as client:
        yield client


def long_job(**given: object) -> Gradient:
    return Gradient(
        model="unhurried",
        inputs=shards(100),
        loss=sum_of_squares,
        mode="train",
        seed=5,
        retain=0,
        **given,
    )


@pytest.fixture(scope="module")
def undisturbed(client: GradClient) -> GradResult:
    return client.submit(long_job(devices=2)).result(WAIT_S)


@pytest.fixture(autouse=True)
def both_devices_are_idle(client: GradClient) -> None:
    wait_until(lambda: num_ranges(client) == 2, what="both devices")


def when_in(phase: str, job: Job) -> None:
    """Wait until shards of a phase are done, and some are not."""
    for event in job.events():
        progress = event.progress
        if progress is not None and progress.phase == phase and 0 < progress.done < progress.total:
            return
    raise AssertionError(f"the job ended before it was seen in its {phase}")


def killed_in(phase: str, part: str, cluster: ClusterBox, job: Job) -> GradResult:
    """Kill a process of the box in a phase of a job, and return the job's result."""
    when_in(phase, job)
    found = running(part, among=cluster.processes())
    if part == COORDINATOR:
        (worker,) = running(f"--name {job.refresh().worker}", among=cluster.processes())
        found = [pid for pid in found if parent(pid) == worker]
    kill(found[0])
    return job.result(WAIT_S)


@pytest.mark.parametrize("phase", [pytest.param("forward", marks=pytest.mark.slow), "replay"])
def test_a_device_that_dies_costs_its_range_alone(
    cluster: ClusterBox, client: GradClient, undisturbed: GradResult, phase: str
) -> None:
    result = killed_in(phase, ACTOR, cluster, client.submit(long_job(devices=2)))
    assert all(torch.equal(result.grads[n], g) for n, g in undisturbed.grads.items())
    lost = [found.devices_lost for found in result.manifest.ranges or ()]
    assert sorted(lost) == [0, 1]
    assert result.manifest.attempts == 1
    assert max(found.rerun_difference for found in result.manifest.ranges or ()) == 0


def rows_job(form: str, **given: object) -> Jacobian:
    reduce = {"reduce": "gram"} if form == "gram" else {"form": form}
    return Jacobian(model="unhurried", inputs=shards(60), **reduce, **given)


@pytest.mark.parametrize(
    "form",
    ["dense", *(pytest.param(form, marks=pytest.mark.slow) for form in ("factored", "gram"))],
)
def test_a_device_that_dies_costs_its_range_of_samples_alone(
    cluster: ClusterBox, client: GradClient, form: str
) -> None:
    expected = client.submit(rows_job(form, devices=2)).result(WAIT_S)
    result = killed_in("samples", ACTOR, cluster, client.submit(rows_job(form, devices=2)))
    wanted = GradResult.gram if form == "gram" else GradResult.flat
    assert torch.equal(wanted(result), wanted(expected))
    assert sorted(run.devices_lost for run in result.manifest.ranges or ()) == [0, 1]
    assert result.manifest.attempts == 1


@pytest.mark.slow
def test_a_whole_job_whose_device_dies_has_another_attempt(
    cluster: ClusterBox, client: GradClient, undisturbed: GradResult
) -> None:
    job = client.submit(long_job(devices=1))
    when_in("forward", job)
    for pid in running(ACTOR, among=cluster.processes()):
        kill(pid)
    result = job.result(WAIT_S)
    assert result.manifest.attempts == 2
    assert difference(result.grads, undisturbed.grads) <= TOLERANCE


@pytest.mark.slow
def test_a_device_that_died_while_it_was_idle_costs_no_attempt(
    cluster: ClusterBox, client: GradClient
) -> None:
    for pid in running(ACTOR, among=cluster.processes()):
        kill(pid)
    job = Gradient(model="unhurried", inputs=shards(2), loss=sum_of_squares, devices=1)
    assert client.submit(job).result(WAIT_S).manifest.attempts == 1


@pytest.mark.slow
@pytest.mark.parametrize("victim", [COORDINATOR, RAYLET], ids=["coordinator", "all of Ray"])
@pytest.mark.parametrize("phase", ["forward", "replay"])
def test_a_job_goes_on_after_what_holds_its_parts_died(
    cluster: ClusterBox, client: GradClient, undisturbed: GradResult, phase: str, victim: str
) -> None:
    result = killed_in(phase, victim, cluster, client.submit(long_job(devices=2)))
    assert (result.manifest.attempts, result.manifest.resumed) == (2, 1)
    assert difference(result.grads, undisturbed.grads) <= TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("victim", [COORDINATOR, RAYLET], ids=["coordinator", "all of Ray"])
def test_a_job_of_samples_begins_again_after_what_holds_its_parts_died(
    cluster: ClusterBox, client: GradClient, victim: str
) -> None:
    expected = client.submit(rows_job("dense", devices=2)).result(WAIT_S)
    result = killed_in("samples", victim, cluster, client.submit(rows_job("dense", devices=2)))
    assert result.manifest.attempts == 2
    assert len(result.manifest.ranges or ()) == 2
    assert torch.equal(result.flat(), expected.flat())
