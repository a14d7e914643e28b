"""A box whose own machine has no free device, on a cluster whose others do not see its files."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator

import pytest
import torch

from gradbox import GradClient, Gradient, Jacobian
from tests.boxes import TestBox, running_box
from tests.cases import CASES
from tests.client.test_scenarios import gradient_of
from tests.cluster.processes import wait_until
from tests.cluster.test_failures import long_job
from tests.cluster.test_jobs import WAIT_S, shards, sum_of_squares
from tests.cluster.test_nodes import Nodes, models_in_a_folder, running_nodes
from tests.oracle import TOLERANCE, difference, naive

pytestmark = [
    pytest.mark.slow,  # the box waits a minute for its own device
    pytest.mark.skipif(os.geteuid() != 0, reason="hides a folder from a process: wants root"),
]


@pytest.fixture(scope="module")
def nodes_and_box(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Nodes, TestBox]]:
    folder = tmp_path_factory.mktemp("elsewhere")
    file = models_in_a_folder(folder / "models")
    with running_nodes(1, mark=uuid.uuid4().hex) as nodes:
        nodes.order("take")
        nodes.order(f"join without {folder}")
        arguments = ("--cluster", nodes.address, "--device", "cpu")
        with running_box(folder / "data", models=file, arguments=arguments) as box:
            yield nodes, box


@pytest.fixture(scope="module")
def client(nodes_and_box: tuple[Nodes, TestBox]) -> Iterator[GradClient]:
    with nodes_and_box[1].client() as client:
        yield client


@pytest.mark.parametrize("name", CASES)
def test_a_job_for_one_device_runs_on_another_machine(client: GradClient, name: str) -> None:
    expected = naive(CASES[name]())
    result = client.submit(gradient_of(CASES[name]())).result(WAIT_S)
    assert result.loss == pytest.approx(expected.loss, rel=TOLERANCE)
    assert difference(result.grads, expected.grads) <= TOLERANCE
    assert result.manifest.ranges is None


def test_a_job_of_one_shard_runs_on_another_machine(client: GradClient) -> None:
    x = torch.cat(shards(4))
    whole, cut = (
        client.submit(Gradient(model="mlp", inputs=inputs, loss=sum_of_squares)).result(WAIT_S)
        for inputs in ([x], shards(4))
    )
    assert difference(whole.grads, cut.grads) <= TOLERANCE
    rows = client.submit(Jacobian(model="mlp", inputs=[x])).result(WAIT_S).flat()
    again = client.submit(Jacobian(model="mlp", inputs=shards(4))).result(WAIT_S).flat()
    assert torch.equal(rows, again)


def test_shards_that_depend_on_each_other_run_there_too(client: GradClient) -> None:
    job = Gradient(
        model="running_mean", inputs=shards(4), loss=sum_of_squares, mode="train", devices="auto"
    )
    result = client.submit(job).result(WAIT_S)
    assert result.grads
    assert result.manifest.ranges is None


def test_a_device_that_joins_later_runs_jobs_beside_the_others(
    nodes_and_box: tuple[Nodes, TestBox], client: GradClient
) -> None:
    def num_devices() -> int:
        jobs = [client.submit(long_job()) for _ in range(2)]
        for job in jobs:
            job.result(WAIT_S)
        return len({job.refresh().worker for job in jobs})

    assert num_devices() == 1
    nodes_and_box[0].order("join")
    wait_until(lambda: num_devices() == 2, what="the second device")
