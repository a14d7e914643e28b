"""What dies while a job runs, and that the job's result is the same."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from gradbox import GradClient, Gradient, GradResult, Jacobian, Job, MixedGradient
from tests.boxes import tensors_in
from tests.cluster.conftest import ClusterBox
from tests.cluster.processes import kill, running, wait_until
from tests.cluster.test_jobs import WAIT_S, num_ranges, shards, sum_of_squares
from tests.cluster.test_kept_graphs import stepped
from tests.oracle import TOLERANCE, difference

ACTOR = "ray::DeviceActor"
LEADER = "the leader"  # the device that leads a job; ACTOR is then the other one
RAYLET = "raylet/raylet"
CONTROL = "gcs/gcs_server"


@pytest.fixture(scope="module")
def client(cluster: ClusterBox) -> GradClient:
    with cluster.box.client() as client:
        yield client


def long_job(**given: object) -> Gradient:
    return Gradient(
        model="unhurried",
        inputs=shards(70),
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
    """Wait until shards of a phase are done, and some are not; cotangents are one step."""
    least = 0 if phase == "cotangents" else 1
    for event in job.events():
        found = event.progress
        if found is not None and found.phase == phase and least <= found.done < found.total:
            return
    raise AssertionError(f"the job ended before it was seen in its {phase}")


def killed_in(phase: str, part: str, cluster: ClusterBox, job: Job) -> GradResult:
    """Kill a process of the box in a phase of a job, and return the job's result."""
    when_in(phase, job)
    leader = cluster.process_of(job.refresh().worker)
    found = [pid for pid in running(part, among=cluster.processes()) if pid != leader]
    kill(leader if part == LEADER else found[0])
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


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["forward", "replay"])
def test_a_job_whose_devices_all_die_at_once_goes_on_when_they_are_back(
    cluster: ClusterBox, client: GradClient, undisturbed: GradResult, phase: str
) -> None:
    job = client.submit(long_job(devices=2))
    when_in(phase, job)
    for pid in running(ACTOR, among=cluster.processes()):
        kill(pid)
    result = job.result(WAIT_S)
    assert all(torch.equal(result.grads[n], g) for n, g in undisturbed.grads.items())
    assert result.manifest.attempts == 2


def deliberate(z: Tensor) -> Tensor:
    """A loss that takes seconds: products of a matrix of (rows, rows)."""
    product = torch.tanh(z @ z.mT)
    for _ in range(300):
        product = torch.tanh(product @ product)
    return (z - z.mean(0)).square().sum() + product.square().mean()


@pytest.mark.slow
@pytest.mark.parametrize("victim", [ACTOR, LEADER, RAYLET])
def test_a_death_during_the_loss_changes_no_result(
    cluster: ClusterBox, client: GradClient, victim: str
) -> None:
    job = replace(long_job(devices=2), inputs=shards(40, rows=16), loss=deliberate)
    expected = client.submit(job).result(WAIT_S)
    result = killed_in("cotangents", victim, cluster, client.submit(job))
    assert result.manifest.seconds.cotangents > 1  # long enough to be met
    assert difference(result.grads, expected.grads) <= TOLERANCE
    assert result.loss == pytest.approx(expected.loss, rel=TOLERANCE)
    lost = [found.devices_lost for found in result.manifest.ranges or ()]
    went = (result.manifest.attempts, result.manifest.resumed, sorted(lost))
    assert went == ((1, 1, [0, 1]) if victim == ACTOR else (2, 1, [0, 0]))


@pytest.mark.slow
def test_a_device_that_dies_between_the_halves_of_a_step_costs_its_range_alone(
    cluster: ClusterBox, client: GradClient
) -> None:
    def a_device_dies() -> None:
        kill(running(ACTOR, among=cluster.processes())[0])

    kept, _, _ = stepped(client, "mlp", devices=2)
    f, first, second = stepped(client, "mlp", devices=2, between=a_device_dies)
    assert sorted(run.shards_retained for run in first.ranges or ()) == [2, 2]
    assert sorted(run.shards_retained for run in second.ranges or ()) == [0, 2]
    assert [(run.start, run.stop) for run in second.ranges or ()] == [(0, 2), (2, 4)]
    assert all(torch.equal(kept.grads[name], g) for name, g in f.grads.items())


def rows_job(form: str, **given: object) -> Jacobian:
    reduce = {"reduce": "gram"} if form == "gram" else {"form": form}
    return Jacobian(model="unhurried", inputs=shards(60), **reduce, **given)


@pytest.mark.slow  # a range is given to another device as that of a set gradient is
@pytest.mark.parametrize("form", ["dense", "factored", "gram"])
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
@pytest.mark.parametrize("victim", [LEADER, RAYLET], ids=["leader", "all of Ray"])
@pytest.mark.parametrize("phase", ["forward", "replay"])
def test_a_job_goes_on_after_what_holds_its_parts_died(
    cluster: ClusterBox, client: GradClient, undisturbed: GradResult, phase: str, victim: str
) -> None:
    result = killed_in(phase, victim, cluster, client.submit(long_job(devices=2)))
    assert (result.manifest.attempts, result.manifest.resumed) == (2, 1)
    assert difference(result.grads, undisturbed.grads) <= TOLERANCE


@pytest.mark.slow
def test_ray_is_started_again_soon_after_its_control_service_died(
    cluster: ClusterBox, client: GradClient
) -> None:
    (dead,) = running(CONTROL, among=cluster.processes())
    kill(dead)
    (raylet,) = running(RAYLET, among=cluster.processes())
    began_s = time.monotonic()
    wait_until(lambda: raylet not in cluster.processes(), what="the old Ray to end")
    assert time.monotonic() - began_s < 30
    wait_until(lambda: running(CONTROL, among=cluster.processes()), what="another Ray")
    job = Gradient(model="unhurried", inputs=shards(2), loss=sum_of_squares, devices=1)
    assert client.submit(job).result(WAIT_S).manifest.attempts == 1


SAMPLES = {
    "dense rows": lambda: rows_job("dense", devices=2),
    "factors": lambda: rows_job("factored", devices=2),
    "a Gram": lambda: rows_job("gram", devices=2),
    "norms": lambda: Jacobian(model="unhurried", inputs=shards(60), reduce="norm", devices=2),
    "vjp": lambda: Jacobian(
        model="unhurried",
        inputs=shards(60),
        reduce="vjp",
        vectors=torch.ones(240, 3, dtype=torch.float64),
        devices=2,
    ),
}


def result_tensors(result: GradResult, folder: Path) -> dict[str, Tensor]:
    """Return all that stands in the result file; of factors, whose tensors may be shared, rows."""
    if result.manifest.form == "factored":
        return {"rows": result.flat()}
    path = folder / f"{result.manifest.job}.safetensors"
    result.save(path)
    return tensors_in(path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "victim"),
    [(name, LEADER) for name in SAMPLES] + [("dense rows", RAYLET)],
    ids=[f"{name}, leader" for name in SAMPLES] + ["dense rows, all of Ray"],
)
def test_a_job_of_samples_goes_on_after_what_holds_its_parts_died(
    cluster: ClusterBox, client: GradClient, tmp_path: Path, name: str, victim: str
) -> None:
    expected = client.submit(SAMPLES[name]()).result(WAIT_S)
    result = killed_in("samples", victim, cluster, client.submit(SAMPLES[name]()))
    assert (result.manifest.attempts, result.manifest.resumed) == (2, 1)
    assert len(result.manifest.ranges or ()) == 2
    found, wanted = (result_tensors(one, tmp_path) for one in (result, expected))
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[key], tensor) for key, tensor in wanted.items())


def mixed_job() -> MixedGradient:
    y = torch.linspace(-1, 1, 3, dtype=torch.float64)
    return MixedGradient(
        model="unhurried",
        inputs=shards(60),
        inner=lambda y, v: (v.tanh() * y).square().sum(),
        outer=lambda dfdz: dfdz.square().sum(),
        y={"y": y},
        mode="train",
        devices=2,
    )


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["forward", "replay"])
def test_a_device_that_dies_costs_its_range_of_a_mixed_gradient_alone(
    cluster: ClusterBox, client: GradClient, phase: str
) -> None:
    expected = client.submit(mixed_job()).result(WAIT_S)
    result = killed_in(phase, ACTOR, cluster, client.submit(mixed_job()))
    assert result.manifest.attempts == 1
    assert sorted(run.devices_lost for run in result.manifest.ranges or ()) == [0, 1]
    assert result.loss == expected.loss
    assert all(torch.equal(result.grads[name], g) for name, g in expected.grads.items())


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["forward", "replay"])
def test_a_mixed_gradient_goes_on_after_its_leader_died(
    cluster: ClusterBox, client: GradClient, phase: str
) -> None:
    expected = client.submit(mixed_job()).result(WAIT_S)
    result = killed_in(phase, LEADER, cluster, client.submit(mixed_job()))
    assert (result.manifest.attempts, result.manifest.resumed) == (2, 1)
    assert len(result.manifest.ranges or ()) == 2
    assert result.loss == expected.loss
    assert all(torch.equal(result.grads[name], g) for name, g in expected.grads.items())
