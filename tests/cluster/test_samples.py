"""Rows for every sample, and mixed gradients, on two devices: what one device returns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gradbox import (
    GradClient,
    GradResult,
    InvalidInputs,
    Jacobian,
    MixedGradient,
    PerSampleGradient,
)
from tests.boxes import tensors_in
from tests.client.test_mixed import mixed
from tests.cluster.conftest import ClusterBox
from tests.cluster.processes import wait_until
from tests.cluster.test_jobs import WAIT_S, num_ranges
from tests.mixed_cases import MIXED_CASES
from tests.oracle import TOLERANCE

SIZES = (3, 1, 4, 2, 2)
NUM_SAMPLES = sum(SIZES)
OUTPUTS = 3
MODEL = "inplace_mlp"  # with dropout, and a forward that writes to its activations


@pytest.fixture(scope="module")
def client(cluster: ClusterBox) -> GradClient:
    with cluster.box.client() as client:
        wait_until(lambda: num_ranges(client) == 2, what="both devices")
        yield client


def normal(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=torch.float64, generator=generator)


def shards_of(*sizes: int) -> list[Tensor]:
    return [normal(size, 5, seed=number) for number, size in enumerate(sizes)]


def distance(z: Tensor, target: Tensor, scale: Tensor) -> Tensor:
    return (z - target).square().sum(1) * scale.sum()


def per_sample(**given: Any) -> PerSampleGradient:
    told = {
        "model": MODEL,
        "inputs": shards_of(*SIZES),
        "loss": distance,
        "loss_inputs": {"target": normal(NUM_SAMPLES, OUTPUTS, seed=9), "scale": torch.ones(3)},
        "mode": "train",
        "seed": 4,
    }
    return PerSampleGradient(**(told | given))


def jacobian(**given: Any) -> Jacobian:
    told = {"model": MODEL, "inputs": shards_of(*SIZES), "mode": "train", "seed": 4}
    return Jacobian(**(told | given))


def two_groups(of: type, **given: Any) -> PerSampleGradient | Jacobian:
    groups = {"own": shards_of(*SIZES), "other": shards_of(2, 3, 1)}
    return of(model=MODEL, inputs=groups, mode="train", seed=4, against="other", **given)


def tensors(result: GradResult, folder: Path) -> dict[str, Tensor]:
    """Return all that stands in the result file."""
    path = folder / f"{result.manifest.job}.safetensors"
    result.save(path)
    return tensors_in(path)


def assert_alike(two: dict[str, Tensor], one: dict[str, Tensor]) -> None:
    assert two.keys() == one.keys()
    for name, expected in one.items():
        assert two[name].shape == expected.shape, name
        if expected.is_floating_point():
            apart = float((two[name] - expected).norm())
            assert apart <= TOLERANCE * float(expected.norm()), name
        else:
            assert torch.equal(two[name], expected), name


JOBS = {
    "dense gradients": lambda n: per_sample(form="dense", devices=n),
    "factored gradients": lambda n: per_sample(form="factored", devices=n),
    "the smaller form": lambda n: per_sample(devices=n),
    "norms": lambda n: per_sample(reduce="norm", devices=n),
    "a Gram of gradients": lambda n: per_sample(reduce="gram", devices=n),
    "a clipped sum": lambda n: per_sample(reduce="clipped_sum", clip=0.7, devices=n),
    "a projection": lambda n: per_sample(reduce="projection", dim=7, devices=n),
    "a dense Jacobian": lambda n: jacobian(form="dense", devices=n),
    "a factored Jacobian": lambda n: jacobian(form="factored", devices=n),
    "a Gram's trace": lambda n: jacobian(reduce="gram_trace", devices=n),
    "vjp": lambda n: jacobian(
        reduce="vjp", vectors=normal(NUM_SAMPLES, OUTPUTS, seed=8), devices=n
    ),
    "jvp": lambda n: jacobian(reduce="jvp", vectors={"0.weight": normal(8, 5, seed=7)}, devices=n),
    "a Gram with another group": lambda n: two_groups(Jacobian, reduce="gram", devices=n),
    "rows in bf16": lambda n: per_sample(form="dense", transfer="bf16", devices=n),
}


@pytest.mark.parametrize("name", JOBS)
def test_two_devices_return_what_one_does(client: GradClient, tmp_path: Path, name: str) -> None:
    one, two = (client.submit(JOBS[name](n)).result(WAIT_S) for n in (1, 2))
    assert len(two.manifest.ranges or ()) == 2
    assert_alike(tensors(two, tmp_path), tensors(one, tmp_path))
    for fact in ("names", "unreached", "samples", "outputs", "form", "roads", "transfer_error"):
        assert getattr(two.manifest, fact) == getattr(one.manifest, fact), fact


def test_products_with_an_earlier_jobs_rows(client: GradClient) -> None:
    earlier = client.submit(jacobian(form="factored", devices=2)).result(WAIT_S)
    vectors = normal(NUM_SAMPLES, OUTPUTS, seed=8)
    for given in ({"reduce": "gram"}, {"reduce": "vjp", "vectors": vectors}):
        one, two = (
            client.submit(jacobian(**given, against=earlier, devices=n)).result(WAIT_S)
            for n in (1, 2)
        )
        found, expected = (
            result.gram() if given["reduce"] == "gram" else result.jvp() for result in (two, one)
        )
        torch.testing.assert_close(found, expected, rtol=TOLERANCE, atol=TOLERANCE)


def test_dense_rows_of_the_other_device_are_handed_to_the_leader_once(client: GradClient) -> None:
    result = client.submit(per_sample(form="dense", devices=2)).result(WAIT_S)
    receipt = result.manifest
    moved = receipt.bytes_moved or {}
    there, *_ = receipt.ranges or ()
    num_samples = sum(SIZES[there.start : there.stop])
    assert moved["rows"] == result.flat()[:num_samples].nbytes
    assert moved["factors"] == moved["sums"] == 0
    assert moved["values"] == num_samples * 8  # the losses
    assert 0 < moved["inputs"] < num_samples * (5 + OUTPUTS) * 8  # what the loss reads: no shard
    assert [(run.start, run.stop) for run in receipt.ranges or ()][-1][1] == len(SIZES)
    assert all(run.samples_s > 0 for run in receipt.ranges or ())


@pytest.mark.parametrize(
    ("reduce", "ranges"),
    [("norm", [(0, 1), (1, 7)]), ("projection", [(0, 3), (3, 7)])],
)
def test_ranges_whose_rows_are_formed_are_cut_by_samples_too(
    client: GradClient, reduce: str, ranges: list[tuple[int, int]]
) -> None:
    shards = [normal(2, 6, 5), *(normal(2, 1, 5) for _ in range(6))]
    dim = {"dim": 4} if reduce == "projection" else {}
    job = PerSampleGradient(
        model="mlp",
        inputs=shards,
        loss=lambda z: z.flatten(1).square().sum(1),
        reduce=reduce,
        devices=2,
        **dim,
    )
    receipt = client.submit(job).result(WAIT_S).manifest
    assert [(run.start, run.stop) for run in receipt.ranges or ()] == ranges


def test_a_gram_moves_each_ranges_factors_once_at_most(client: GradClient) -> None:
    rows = client.submit(jacobian(form="factored", devices=2)).result(WAIT_S).manifest
    gram = client.submit(jacobian(reduce="gram", devices=2)).result(WAIT_S).manifest
    assert 0 < (gram.bytes_moved or {})["factors"] <= (rows.bytes_moved or {})["factors"]


def test_rows_of_different_lengths_are_refused_as_on_one_device(client: GradClient) -> None:
    given = {"inputs": [normal(2, 4, 5), normal(2, 3, 5)], "mode": "eval"}
    for devices in (1, 2):
        with pytest.raises(InvalidInputs, match="outputs a sample"):
            client.submit(jacobian(**given, devices=devices)).result(WAIT_S)


@pytest.mark.parametrize("name", ["mlp, cubic", "mlp, outer reads y", "cnn in train"])
def test_a_mixed_gradient_on_two_devices_is_that_of_one(
    client: GradClient, tmp_path: Path, name: str
) -> None:
    def job(devices: int) -> MixedGradient:
        model = "mixed_cnn" if name.startswith("cnn") else "mixed_inplace_mlp"
        returns = ("grads", "dfdz")
        return mixed(MIXED_CASES[name](), model, returns=returns, devices=devices)

    one, two = (client.submit(job(n)).result(WAIT_S) for n in (1, 2))
    assert len(two.manifest.ranges or ()) == 2
    assert two.loss == pytest.approx(one.loss, rel=TOLERANCE)
    assert_alike(tensors(two, tmp_path), tensors(one, tmp_path))
    assert two.manifest.names == one.manifest.names
    dfdz_bytes = two.dfdz.numel() * 8
    assert 0 < (two.manifest.bytes_moved or {})["outputs"] < dfdz_bytes
