"""Graphs that wait on the devices of a cluster between the halves of a step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from gradbox import GradClient, Gradient
from gradbox.protocol import Receipt
from gradbox.remote.model import RemoteModel
from tests.cluster.conftest import ClusterBox
from tests.cluster.processes import wait_until
from tests.cluster.test_jobs import WAIT_S, num_ranges, shards, sum_of_squares
from tests.oracle import TOLERANCE, difference

NUM_SHARDS = 4


@pytest.fixture(scope="module")
def client(cluster: ClusterBox) -> Iterator[GradClient]:
    with cluster.box.client() as client:
        wait_until(lambda: num_ranges(client) == 2, what="both devices")
        yield client


def stepped(
    client: GradClient,
    model: str = "unhurried",
    *,
    between: Callable[[], object] = lambda: None,
    **given: Any,
) -> tuple[RemoteModel, Receipt, Receipt]:
    """Run a step with something between its halves; return their receipts, too."""
    f = client.model(model, mode="train", seed=5, **given)
    loss = sum_of_squares(torch.cat([f(x) for x in shards(NUM_SHARDS)]))
    between()
    loss.backward()
    second, first = halves(client)
    return f, first, second


def halves(client: GradClient, num_jobs: int = 2) -> list[Receipt]:
    """Return the receipts of the newest jobs of remote calls, the last one first."""
    receipts = (job.result().manifest for job in client.jobs(limit=num_jobs + 1))
    return [receipt for receipt in receipts if receipt.loss is None][:num_jobs]


def went(receipt: Receipt) -> tuple[int | None, int | None]:
    return receipt.shards_retained, receipt.shards_replayed


def kept_by_range(receipt: Receipt) -> list[int]:
    return [run.shards_retained for run in receipt.ranges or ()]


@pytest.mark.parametrize("model", ["unhurried", "mlp"])  # with buffers that change, and without
def test_a_step_in_ranges_replays_nothing(client: GradClient, model: str) -> None:
    f, first, second = stepped(client, model, devices=2)
    assert went(first) == (NUM_SHARDS, None)
    assert went(second) == (NUM_SHARDS, 0)
    assert kept_by_range(first) == kept_by_range(second) == [2, 2]
    assert [run.device for run in second.ranges or ()] == [run.device for run in first.ranges or ()]
    job = Gradient(
        model=model, inputs=shards(NUM_SHARDS), loss=sum_of_squares, mode="train", seed=5
    )
    assert difference(f.grads, client.submit(job).result(WAIT_S).grads) <= TOLERANCE


def test_what_was_kept_in_ranges_changes_no_bit(client: GradClient) -> None:
    kept, _, _ = stepped(client, "mlp", devices=2)
    replayed, first, second = stepped(client, "mlp", devices=2, retain=0)
    assert [went(first), went(second)] == [(0, None), (0, NUM_SHARDS)]
    assert kept_by_range(first) == [0, 0]
    assert all(torch.equal(kept.grads[name], g) for name, g in replayed.grads.items())


def test_a_budget_holds_for_each_device(client: GradClient) -> None:
    _, first, second = stepped(client, "mlp", devices=2, retain=1300)
    assert kept_by_range(first) == kept_by_range(second) == [1, 1]
    assert went(second) == (2, 2)


def test_a_step_on_one_of_two_devices_finds_the_one_that_it_began_on(client: GradClient) -> None:
    for _ in range(3):  # the other one was idle longer each time
        _, first, second = stepped(client)
        assert first.ranges is None
        assert second.ranges is None
        assert went(second) == (NUM_SHARDS, 0)


def test_graphs_go_when_another_job_wants_the_device(client: GradClient) -> None:
    def another_job() -> None:
        job = Gradient(model="mlp", inputs=shards(4), loss=sum_of_squares, devices=2)
        client.submit(job).result(WAIT_S)

    kept, _, _ = stepped(client, "mlp", devices=2)
    f, _, second = stepped(client, "mlp", devices=2, between=another_job)
    assert went(second) == (0, NUM_SHARDS)
    assert all(torch.equal(kept.grads[name], g) for name, g in f.grads.items())


def test_a_second_backward_pass_in_ranges_is_replayed(client: GradClient) -> None:
    f = client.model("mlp", devices=2)
    loss = sum_of_squares(torch.cat([f(x) for x in shards(NUM_SHARDS)]))
    loss.backward(retain_graph=True)
    once: dict[str, Tensor] = f.grads
    loss.backward()
    assert [went(receipt) for receipt in reversed(halves(client))] == [
        (NUM_SHARDS, 0),
        (0, NUM_SHARDS),
    ]
    assert all(torch.equal(f.grads[name], 2 * gradient) for name, gradient in once.items())
