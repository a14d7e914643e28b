"""Runs on a cluster: the state lives with one device, and is computed again where that dies."""

from __future__ import annotations

import os
import signal

import pytest
import torch
from torch import Tensor

from gradbox import Forward, GradClient, Optimizer, TrainRun, TrainStep, step_seed
from gradbox_engine import shard_stream
from tests.cluster.conftest import ClusterBox
from tests.cluster.models import unhurried

RATE = 0.02
NUM_STEPS = 6


@pytest.fixture(scope="module")
def client(cluster: ClusterBox) -> GradClient:
    with cluster.box.client() as client:
        yield client


def shards(number: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(number)
    return [torch.randn(4, 5, dtype=torch.float64, generator=generator) for _ in range(2)]


def mean_square(z: Tensor) -> Tensor:
    return z.square().mean()


def begun(client: GradClient, **given: object) -> TrainRun:
    optimizer = Optimizer("sgd", lr=RATE, momentum=0.9)
    return client.train("unhurried", optimizer=optimizer, seed=3, **given)


def stepped(run: TrainRun) -> TrainStep:
    inputs = shards(run.num_steps + 1)
    return run.step(inputs=inputs, loss=mean_square, devices="auto", progress=False)


def test_steps_are_those_of_a_plain_loop_also_when_their_device_is_killed(
    cluster: ClusterBox, client: GradClient
) -> None:
    model = unhurried().train()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    undisturbed, run = begun(client), begun(client)
    devices = []
    for number in range(1, NUM_STEPS + 1):
        optimizer.zero_grad()
        z = []
        for place, x in enumerate(shards(number)):
            with shard_stream(step_seed(run.seed, number), group=0, shard=place):
                z.append(model(x))
        loss = mean_square(torch.cat(z))
        loss.backward()
        optimizer.step()
        assert stepped(undisturbed).loss == pytest.approx(loss.item(), rel=1e-10)
        step = stepped(run)
        assert step.loss == pytest.approx(loss.item(), rel=1e-10)
        devices.append(client.job(step.manifest.job).view.worker)
        if number == NUM_STEPS // 2:
            os.kill(cluster.process_of(devices[-1]), signal.SIGKILL)
    weights, expected = run.weights(), undisturbed.weights()
    assert weights.keys() == expected.keys()
    for name, tensor in weights.items():
        assert torch.equal(tensor, expected[name])
        torch.testing.assert_close(tensor, model.state_dict()[name], rtol=0, atol=1e-12)
    # Both runs' devices are free in turn, so each went on where its state was.
    assert len(set(devices[: NUM_STEPS // 2])) == 1
    assert [step.number for step in run.history()] == [*range(1, NUM_STEPS + 1)]


def test_another_job_runs_on_a_runs_weights(client: GradClient) -> None:
    run = begun(client, mode="eval")
    stepped(run)
    run.save("on-a-cluster")
    for weights in (run, "on-a-cluster"):
        job = Forward(model="unhurried", inputs=shards(9), weights=weights, devices="auto")
        result = client.run(job)
        assert (result.manifest.state_run, result.manifest.state_step) == (run.id, 1)
    model = unhurried().eval()
    model.load_state_dict(run.weights(), strict=False)
    expected = torch.cat([model(x) for x in shards(9)])
    torch.testing.assert_close(result.outputs["z"], expected, rtol=0, atol=1e-12)
