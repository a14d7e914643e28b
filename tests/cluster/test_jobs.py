"""Jobs on a box with two devices: what they return, and what their receipts say."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor

from gradbox import (
    Forward,
    GradClient,
    Gradient,
    InvalidInputs,
    InvalidJob,
    Jacobian,
    JobCancelled,
    JobTimedOut,
    ModelCallFailed,
    Penalty,
    pack,
)
from tests.cases import CASES
from tests.client.test_scenarios import gradient_of
from tests.cluster.conftest import ClusterBox
from tests.cluster.processes import wait_until
from tests.oracle import TOLERANCE, difference, naive

WAIT_S = 120.0


@pytest.fixture(scope="module")
def client(cluster: ClusterBox) -> GradClient:
    with cluster.box.client() as client:
        wait_until(lambda: num_ranges(client) == 2, what="both devices")
        yield client


def shards(number: int, *, rows: int = 4) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(rows, 5, dtype=torch.float64, generator=generator) for _ in range(number)]


def sum_of_squares(z: Tensor) -> Tensor:
    return (z - z.mean(0)).square().sum()


def unhurried(number: int = 8, **given: object) -> Gradient:
    return Gradient(
        model="unhurried",
        inputs=shards(number),
        loss=sum_of_squares,
        mode="train",
        seed=5,
        **given,
    )


def num_ranges(client: GradClient) -> int:
    """Return on how many devices a job runs that would take all."""
    receipt = client.submit(unhurried(6, devices="auto")).result(WAIT_S).manifest
    return len(receipt.ranges or ())


@pytest.mark.parametrize("name", CASES)
def test_a_job_on_all_devices_returns_what_naive_code_computes(
    client: GradClient, name: str
) -> None:
    expected = naive(CASES[name]())
    job = gradient_of(CASES[name](), returns=("grads", "buffers"), devices="auto")
    result = client.submit(job).result(WAIT_S)
    assert result.loss == pytest.approx(expected.loss, rel=TOLERANCE)
    assert difference(result.grads, expected.grads) <= TOLERANCE
    assert list(result.names) == list(expected.grads)
    assert set(result.manifest.unreached) == expected.unreached
    assert result.buffers.keys() == expected.buffers.keys()
    for buffer, value in expected.buffers.items():
        torch.testing.assert_close(result.buffers[buffer], value, rtol=1e-12, atol=0)


def test_the_receipt_states_ranges_devices_and_bytes(client: GradClient) -> None:
    job = Gradient(model="mlp", inputs=shards(8), loss=sum_of_squares, devices=2)
    receipt = client.submit(job).result(WAIT_S).manifest
    assert receipt.ranges is not None
    assert [(r.start, r.stop) for r in receipt.ranges] == [(0, 4), (4, 8)]
    assert len({r.device for r in receipt.ranges}) == 2
    z_bytes = 4 * 4 * 3 * 8  # of the range that the leader does not run itself
    assert receipt.bytes_moved is not None
    assert receipt.bytes_moved["outputs"] == receipt.bytes_moved["cotangents"] == z_bytes
    parameters = 5 * 8 + 8 + 8 * 8 + 8 + 8 * 3 + 3
    assert receipt.bytes_moved["sums"] == parameters * 8  # to the device that writes the result


def test_ranges_are_cut_by_bytes(client: GradClient) -> None:
    inputs = [*shards(1, rows=12), *shards(3, rows=4)]
    job = Gradient(model="mlp", inputs=inputs, loss=sum_of_squares, devices=2)
    receipt = client.submit(job).result(WAIT_S).manifest
    assert [(r.start, r.stop) for r in receipt.ranges or ()] == [(0, 1), (1, 4)]


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_packed_shards_are_split_too(client: GradClient, mode: str) -> None:
    mask = (torch.arange(9) < torch.tensor([3, 9, 1, 4, 4, 2, 9, 5])[:, None]).double()
    samples = torch.randn(8, 9, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    whole = {"x": samples, "attention_mask": mask}
    packed = pack(whole, tokens=18)
    common = {"model": "masked_mean", "mode": mode, "streams": "sample", "seed": 3}

    def weighted(z: Tensor) -> Tensor:
        return (z * torch.arange(8.0)[:, None]).square().sum()

    one, two = (
        Gradient(inputs=packed.shards, order=packed.order, loss=weighted, devices=devices, **common)
        for devices in (1, 2)
    )
    found, expected = client.submit(two).result(WAIT_S), client.submit(one).result(WAIT_S)
    assert len(found.manifest.ranges or ()) == 2
    assert difference(found.grads, expected.grads) <= TOLERANCE
    if mode == "eval":
        unpacked = Gradient(inputs=[whole], loss=weighted, **common)
        assert difference(found.grads, client.submit(unpacked).result(WAIT_S).grads) <= TOLERANCE


def test_a_model_that_its_shards_change_is_refused_and_the_devices_are_lent_again(
    client: GradClient,
) -> None:
    job = Gradient(model="hooking", inputs=shards(4), loss=sum_of_squares, devices=2)
    with pytest.raises(ModelCallFailed, match="its hooks"):
        client.submit(job).result(WAIT_S)
    wait_until(lambda: num_ranges(client) == 2, what="both devices")


def test_a_job_that_asks_for_one_device_runs_on_one(client: GradClient) -> None:
    receipt = client.submit(unhurried()).result(WAIT_S).manifest
    assert receipt.ranges is None
    assert receipt.device == "cpu"


def test_a_job_may_ask_for_more_devices_than_there_are(client: GradClient) -> None:
    receipt = client.submit(unhurried(devices=50)).result(WAIT_S).manifest
    assert len(receipt.ranges or ()) == 2


def test_the_same_ranges_give_the_same_bits(client: GradClient) -> None:
    first, second = (client.submit(unhurried(devices=2)).result(WAIT_S) for _ in range(2))
    assert all(torch.equal(first.grads[name], second.grads[name]) for name in first.grads)


@pytest.mark.parametrize(
    "given",
    [
        {"retain": 0},
        {"streams": "sample"},
        {"precision": "bf16"},
        {"transfer": "bf16"},
        {"returns": ("grads", "outputs", "cotangents")},
        {"wrt": ["inputs.*", "layers.0.*"]},
        {"penalties": [Penalty(at="layers.0", loss=lambda tap: tap.square().mean())]},
    ],
    ids=lambda given: next(iter(given)),
)
def test_options_mean_the_same_on_several_devices(
    client: GradClient, given: dict[str, object]
) -> None:
    one, two = (client.submit(unhurried(4, devices=n, **given)).result(WAIT_S) for n in (1, 2))
    assert len(two.manifest.ranges or ()) == 2
    near = 2e-2 if "bf16" in given.values() else TOLERANCE
    assert two.loss == pytest.approx(one.loss, rel=near)
    assert two.grads.keys() == one.grads.keys()
    assert difference(two.grads, one.grads) <= near
    rounding = one.manifest.transfer_error or 0.0
    assert (two.manifest.transfer_error or 0.0) == pytest.approx(rounding, rel=1e-6)
    for name, output in one.outputs.items():
        torch.testing.assert_close(two.outputs[name], output, rtol=near, atol=near)


def test_gradients_that_are_not_asked_for_are_not_in_the_result(client: GradClient) -> None:
    result = client.submit(unhurried(4, devices=2, returns=("cotangents",))).result(WAIT_S)
    assert not result.grads
    assert result.cotangents.keys() == {"z"}


def test_weights_of_the_job_reach_every_device(client: GradClient) -> None:
    weights = {"layers.4.bias": torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)}

    def squares(z: Tensor) -> Tensor:
        return z.square().sum()

    def job(devices: int) -> Gradient:
        return Gradient(
            model="unhurried", inputs=shards(4), loss=squares, weights=weights, devices=devices
        )

    one, two = (client.submit(job(n)).result(WAIT_S) for n in (1, 2))
    assert two.loss == pytest.approx(one.loss, rel=TOLERANCE)
    assert difference(two.grads, one.grads) <= TOLERANCE


def test_a_model_whose_shards_are_coupled_runs_on_one_device_where_it_may(
    client: GradClient,
) -> None:
    def job(devices: object) -> Gradient:
        return Gradient(
            model="running_mean",
            inputs=shards(4),
            loss=sum_of_squares,
            mode="train",
            devices=devices,  # type: ignore[arg-type]
        )

    auto, one = (client.submit(job(n)).result(WAIT_S) for n in ("auto", 1))
    assert auto.manifest.ranges is None
    assert "average" in (auto.manifest.not_split or "")
    assert difference(auto.grads, one.grads) == 0
    with pytest.raises(InvalidInputs, match="average"):
        client.submit(job(2)).result(WAIT_S)


def test_a_forward_job_is_split(client: GradClient) -> None:
    def job(devices: int) -> Forward:
        return Forward(
            model="unhurried",
            inputs=shards(4),
            mode="train",
            returns=("outputs", "buffers"),
            devices=devices,
        )

    one, two = (client.submit(job(n)).result(WAIT_S) for n in (1, 2))
    assert len(two.manifest.ranges or ()) == 2
    assert torch.equal(two.outputs["z"], one.outputs["z"])
    for name, buffer in one.buffers.items():
        torch.testing.assert_close(two.buffers[name], buffer, rtol=1e-12, atol=0)


def test_an_error_on_a_device_is_told_as_from_one_device(client: GradClient) -> None:
    wrong = [torch.zeros(4, 6, dtype=torch.float64) for _ in range(4)]
    said = []
    for devices in (1, 2):
        job = Gradient(model="unhurried", inputs=wrong, loss=sum_of_squares, devices=devices)
        with pytest.raises(ModelCallFailed) as error:
            client.submit(job).result(WAIT_S)
        said.append(re.sub(r"shard \d", "shard", str(error.value)))
    assert said[0] == said[1]


@pytest.mark.parametrize("devices", [0, -1, "all", True, 1.5])
def test_a_number_of_devices_that_is_none_is_refused(client: GradClient, devices: object) -> None:
    with pytest.raises(InvalidJob, match="devices"):
        client.submit(unhurried(4, devices=devices))


def long_rows(**given: object) -> Jacobian:
    return Jacobian(model="unhurried", inputs=shards(400), form="dense", **given)


LONG = {
    "a set gradient": lambda **given: unhurried(400, **given),
    "rows": long_rows,
}


@pytest.mark.parametrize("name", LONG)
def test_a_cancelled_job_frees_its_devices(client: GradClient, name: str) -> None:
    job = client.submit(LONG[name](devices="auto"))
    next(event for event in job.events() if event.progress is not None)
    job.cancel()
    with pytest.raises(JobCancelled):
        job.result(WAIT_S)
    wait_until(lambda: num_ranges(client) == 2, what="both devices")


def test_a_job_over_its_time_is_stopped_on_all_devices(client: GradClient) -> None:
    with pytest.raises(JobTimedOut):
        client.submit(unhurried(400, devices="auto", timeout_s=1.5)).result(WAIT_S)
    wait_until(lambda: num_ranges(client) == 2, what="both devices")


def test_a_job_finds_the_devices_that_the_one_before_it_had(client: GradClient) -> None:
    for _ in range(3):
        job = Gradient(model="unhurried", inputs=shards(2), loss=sum_of_squares, devices=1)
        client.submit(job).result(WAIT_S)
        assert num_ranges(client) == 2
        assert num_ranges(client) == 2
