"""What dies while jobs of the other kinds run, and that their results have the same bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from gradbox import Forward, GradClient, Gradient, MixedGradient, PerSampleGradient, pack
from gradbox.computations import Computation
from tests.cluster.conftest import ClusterBox
from tests.cluster.processes import kill, running, wait_until
from tests.cluster.test_failures import (
    ACTOR,
    LEADER,
    RAYLET,
    killed_in,
    result_tensors,
    when_in,
)
from tests.cluster.test_jobs import WAIT_S, num_ranges, shards, sum_of_squares
from tests.cluster.test_kept_graphs import stepped, went
from tests.oracle import TOLERANCE, difference

pytestmark = pytest.mark.slow

NUM_SHARDS = 60
NUM_PACKED = 240


@pytest.fixture(scope="module")
def client(cluster: ClusterBox) -> Iterator[GradClient]:
    with cluster.box.client() as client:
        yield client


@pytest.fixture(autouse=True)
def both_devices_are_idle(client: GradClient) -> None:
    wait_until(lambda: num_ranges(client) == 2, what="both devices")


def packed(streams: Literal["shard", "sample"], devices: int, **given: Any) -> Gradient:
    generator = torch.Generator().manual_seed(2)
    lengths = torch.randint(1, 10, (NUM_PACKED, 1), generator=generator)
    whole = {
        "x": torch.randn(NUM_PACKED, 9, 5, dtype=torch.float64, generator=generator),
        "attention_mask": (torch.arange(9) < lengths).double(),
    }
    cut = pack(whole, tokens=18)

    def weighted(z: Tensor, by: Tensor) -> Tensor:
        return (z * by).square().sum() + z.mean(0).square().sum()

    return Gradient(
        model="unhurried_mean",
        inputs=cut.shards,
        order=cut.order,
        streams=streams,
        loss=weighted,
        loss_inputs={"by": torch.linspace(-1, 1, NUM_PACKED, dtype=torch.float64)[:, None]},
        mode="train",
        retain=0,
        returns=("grads", "outputs", "cotangents"),
        devices=devices,
        **given,
    )


def per_sample(devices: int, **given: Any) -> PerSampleGradient:
    return PerSampleGradient(
        model="unhurried",
        inputs=shards(NUM_SHARDS),
        loss=lambda z: z.square().sum(1),
        devices=devices,
        **given,
    )


def forward(devices: int, **given: Any) -> Forward:
    return Forward(
        model="unhurried",
        inputs=shards(NUM_SHARDS),
        mode="train",
        returns=("outputs", "buffers"),
        devices=devices,
        **given,
    )


def deliberate(dfdz: Tensor) -> Tensor:
    """Takes long enough for something to die meanwhile."""
    product = torch.tanh(dfdz @ dfdz.mT)
    for _ in range(400):
        product = torch.tanh(product @ product)
    return dfdz.square().sum() + product.square().mean()


def mixed(devices: int, **given: Any) -> MixedGradient:
    return MixedGradient(
        model="unhurried",
        inputs=shards(NUM_SHARDS),
        inner=lambda y, v: (v.tanh() * y).square().sum(),
        outer=deliberate,
        y={"y": torch.linspace(-1, 1, 3, dtype=torch.float64)},
        mode="train",
        returns=("grads", "dfdz"),
        devices=devices,
        **given,
    )


JOBS: dict[str, Callable[..., Computation]] = {
    "forward": forward,
    "packed": partial(packed, "shard"),
    "packed, streams of samples": partial(packed, "sample"),
    "norms": partial(per_sample, reduce="norm"),
    "a clipped sum": partial(per_sample, reduce="clipped_sum", clip=0.7),
    "mixed": mixed,
}


@pytest.mark.parametrize(
    ("name", "phase", "victim"),
    [
        ("forward", "forward", ACTOR),
        ("forward", "forward", LEADER),
        ("packed", "forward", ACTOR),
        ("packed", "replay", LEADER),
        ("packed, streams of samples", "forward", LEADER),
        ("packed, streams of samples", "replay", ACTOR),
        ("norms", "samples", ACTOR),
        ("a clipped sum", "samples", ACTOR),
        ("mixed", "cotangents", ACTOR),
        ("mixed", "cotangents", LEADER),
        ("mixed", "cotangents", RAYLET),
    ],
)
def test_a_death_changes_no_bit(
    cluster: ClusterBox, client: GradClient, tmp_path: Path, name: str, phase: str, victim: str
) -> None:
    one, two = (client.submit(JOBS[name](n)).result(WAIT_S) for n in (1, 2))
    result = killed_in(phase, victim, cluster, client.submit(JOBS[name](2)))
    found, expected, of_one = (result_tensors(given, tmp_path) for given in (result, two, one))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], tensor) for key, tensor in expected.items())
    of_one.pop("filler", None)  # aligns what a device writes, see docs/wire.md
    counted = {key for key, tensor in of_one.items() if not tensor.is_floating_point()}
    assert all(torch.equal(found[key], of_one.pop(key)) for key in counted)
    assert difference({key: found[key] for key in of_one}, of_one) <= TOLERANCE
    ranges = [(run.start, run.stop) for run in result.manifest.ranges or ()]
    assert ranges == [(run.start, run.stop) for run in two.manifest.ranges or ()]
    lost = sum(run.devices_lost for run in result.manifest.ranges or ())
    assert (result.manifest.attempts, lost) == ((1, 1) if victim == ACTOR else (2, 0))


@pytest.mark.parametrize("victim", [ACTOR, RAYLET])
def test_a_death_between_the_halves_of_a_step_changes_no_bit(
    cluster: ClusterBox, client: GradClient, victim: str
) -> None:
    def it_dies() -> None:
        kill(running(victim, among=cluster.processes())[0])

    kept, _, _ = stepped(client, devices=2)
    f, first, _ = stepped(client, devices=2, between=it_dies)
    assert went(first) == (4, None)
    assert all(torch.equal(kept.grads[name], g) for name, g in f.grads.items())


@pytest.mark.parametrize("number", [0, 1])
def test_a_job_that_cannot_be_split_lives_through_the_death_of_a_device_it_tried(
    cluster: ClusterBox, client: GradClient, number: int
) -> None:
    def job(devices: int | Literal["auto"]) -> Gradient:
        return Gradient(
            model="running_mean",
            inputs=shards(40),
            loss=sum_of_squares,
            mode="train",
            devices=devices,
        )

    expected = client.submit(job(1)).result(WAIT_S)
    asked = client.submit(job("auto"))
    when_in("forward", asked)
    kill(running(ACTOR, among=cluster.processes())[number])
    result = asked.result(WAIT_S)
    assert "average" in (result.manifest.not_split or "")
    assert all(torch.equal(result.grads[name], g) for name, g in expected.grads.items())
