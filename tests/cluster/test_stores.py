"""Queries of a gradient store on two devices: what one device returns, to the last bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from gradbox import CountSketch, GradClient, GradStore, InvalidJob
from gradbox.protocol import StoreQuerySpec
from gradbox.results.result import Tensors
from gradbox.stores.jobs import StoreJob
from tests.cluster.conftest import ClusterBox
from tests.cluster.processes import kill, running, wait_until
from tests.cluster.test_failures import ACTOR
from tests.cluster.test_jobs import WAIT_S, num_ranges

MODEL = "mlp"


@pytest.fixture(scope="module")
def client(cluster: ClusterBox) -> GradClient:
    with cluster.box.client() as client:
        wait_until(lambda: num_ranges(client) == 2, what="both devices")
        yield client


def loss(z: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(z, labels, reduction="none")


def samples(*sizes: int, seed: int) -> dict[str, Any]:
    """Return what jobs on samples take, in shards of these sizes."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(sum(sizes), 5, generator=generator, dtype=torch.float64)
    labels = torch.arange(len(x)) % 3
    return {"inputs": list(x.split(sizes)), "loss": loss, "loss_inputs": {"labels": labels}}


def filled(store: GradStore, *sizes: int) -> GradStore:
    """Add parts of these sizes."""
    for number, size in enumerate(sizes):
        first = len(store)
        store.add(**samples(size, seed=number), ids=range(first, first + size))
    return store


@pytest.fixture(scope="module")
def store(client: GradClient) -> GradStore:
    store = filled(client.store("parts", model=MODEL, dtype="fp32"), 4, 2, 5)
    store.fit("ekfac", **samples(6, seed=7))
    return store


@pytest.fixture(scope="module")
def large(client: GradClient) -> GradStore:
    """A store of 48 MiB, blocks of which have four rows."""
    store = client.store("large", model=MODEL, projection=CountSketch(2**20), dtype="fp32")
    return filled(store, 5, 7)


@pytest.mark.parametrize(
    "options",
    [
        {"top": 3},
        {"top": 2, "bottom": 4},
        {"top": 99, "unit_norm": True},
        {"top": 4, "precondition": "ekfac"},
    ],
    ids=str,
)
def test_the_largest_scores_are_those_of_one_device(
    client: GradClient, store: GradStore, options: dict[str, Any]
) -> None:
    asked = samples(2, 3, seed=9) | options
    one, two = (store.query(**asked, devices=devices) for devices in (1, 2))
    assert torch.equal(two.scores, one.scores)
    assert torch.equal(two.rows, one.rows)
    assert two.ids == one.ids
    assert torch.equal(two.losses, one.losses)
    assert len(two.manifest.ranges or ()) == 2
    assert len({run.device for run in two.manifest.ranges or ()}) == 2


@pytest.mark.parametrize("options", [{}, {"unit_norm": True}], ids=str)
def test_all_scores_are_those_of_one_device(store: GradStore, options: dict[str, Any]) -> None:
    asked = samples(2, 3, seed=9) | options
    one, two = (store.scores(**asked, devices=devices)[:] for devices in (1, 2))
    assert torch.equal(two, one)
    assert two.shape == (5, 11)


def test_one_shard_of_queries_is_compared_on_as_many_devices_as_the_rows_are_worth(
    large: GradStore, store: GradStore
) -> None:
    asked = samples(3, seed=9) | {"top": 3, "bottom": 2}
    one, two = (large.query(**asked, devices=devices) for devices in (1, "auto"))
    assert torch.equal(two.scores, one.scores)
    assert torch.equal(two.rows, one.rows)
    receipt = two.manifest
    assert (one.manifest.device, receipt.device) == ("cpu", "2 devices")
    assert [(run.start, run.stop) for run in receipt.ranges or ()] == [(0, 1)]  # of shards
    moved = receipt.bytes_moved or {}
    assert moved["inputs"] == 3 * 2**20 * 4  # the queries' rows
    assert moved["values"] == 3 * 5 * (4 + 8)  # scores and rows of one range
    assert receipt.seconds.products > 0
    assert store.query(**asked, devices="auto").manifest.ranges is None


def test_a_fit_on_several_devices_is_refused(store: GradStore) -> None:
    with pytest.raises(InvalidJob, match="devices"):
        store.fit("ekfac", **samples(3, 3, seed=7), devices=2)


@pytest.mark.slow  # a lost device without Ray: tests/worker/test_scoring
def test_a_device_that_dies_before_it_has_scored_costs_its_blocks_alone(
    cluster: ClusterBox, client: GradClient
) -> None:
    store = filled(client.store("unhurried", model="unhurried", dtype="fp32"), 4, 2, 5)
    asked = samples(3, 2, seed=9)
    expected = torch.as_tensor(store.scores(**asked)[:])
    view = store.view
    job = client.submit(
        StoreJob(model=view.model, store=view, spec=StoreQuerySpec, devices=2, **asked)
    )
    wait_until(lambda: job.refresh().state == "running", what="the job to run")
    leader = cluster.process_of(job.refresh().worker)
    kill(next(pid for pid in running(ACTOR, among=cluster.processes()) if pid != leader))
    result = job.result(WAIT_S)
    assert torch.equal(torch.as_tensor(Tensors(result._file, "samples")["scores"][:]), expected)
    assert result.manifest.attempts == 1
