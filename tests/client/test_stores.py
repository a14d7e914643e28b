"""Gradient stores on a box that runs: rows once each, scores, grants, and what goes when."""

from __future__ import annotations

import json
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

from gradbox import (
    CountSketch,
    GradStore,
    InvalidInputs,
    InvalidJob,
    Optimizer,
    PerLayer,
    Rademacher,
    StoreConflict,
    StoreNotFound,
)
from gradbox.client import GradClient
from tests.boxes import TestBox
from tests.case_models import mlp

MODEL = "mlp"
TWIN = mlp()  # seeding draws from what a box in this process draws from, too


def samples(count: int, *, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, 5, generator=generator, dtype=torch.float64)


def targets(count: int) -> Tensor:
    return torch.arange(count) % 3


def loss(z: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(z, labels, reduction="none")


def rows_of(x: Tensor, labels: Tensor, *, model: nn.Module | None = None) -> Tensor:
    """Return the gradients of all samples by a loop, (B, P), in the order of parameters."""
    model, rows = model or mlp(), []
    for one, label in zip(x, labels, strict=True):
        model.zero_grad()
        loss(model(one[None]), label[None]).sum().backward()
        grads = [p.grad for p in model.parameters()]
        rows.append(torch.cat([grad.flatten() for grad in grads if grad is not None]))
    return torch.stack(rows)


def added(store: GradStore, ids: list[Any], *, seed: int) -> None:
    x = samples(len(ids), seed=seed)
    result = store.add(
        inputs=[x[:1], x[1:]], loss=loss, loss_inputs={"labels": targets(len(ids))}, ids=ids
    )
    assert torch.allclose(result.losses[:], loss(TWIN(x), targets(len(ids))))


def all_rows(*given: tuple[int, int]) -> Tensor:
    return torch.cat([rows_of(samples(n, seed=seed), targets(n)) for n, seed in given])


def asked(store: GradStore, **options: Any) -> dict[str, Any]:
    return {
        "inputs": [samples(4, seed=9)], "loss": loss, "loss_inputs": {"labels": targets(4)}
    } | options  # fmt: skip


QUERIES = rows_of(samples(4, seed=9), targets(4))


def test_scores_are_products_of_whole_rows(client: GradClient) -> None:
    store = client.store("whole", model=MODEL, dtype="fp32")
    assert len(store) == 0
    with pytest.raises(InvalidJob, match="no rows yet"):
        store.query(**asked(store))
    added(store, [3, 1, 4], seed=1)
    added(store, [15, 9], seed=2)
    expected = all_rows((3, 1), (2, 2))
    assert len(store) == 5
    assert store.ids() == [3, 1, 4, 15, 9]
    assert torch.allclose(store.rows[0:5].double(), expected, atol=1e-6)
    assert torch.allclose(store.rows[2:4].double(), expected[2:4], atol=1e-6)
    assert torch.allclose(store.rows[-1].double(), expected[4], atol=1e-6)
    scores = store.scores(**asked(store))
    assert torch.allclose(torch.as_tensor(scores[:]).double(), QUERIES @ expected.T, atol=1e-5)
    hits = store.query(**asked(store), top=2)
    best = (QUERIES @ expected.T).topk(2)
    assert torch.allclose(hits.scores.double(), best.values, atol=1e-5)
    assert hits.ids == [[store.ids()[row] for row in some] for some in best.indices.tolist()]
    both = store.query(**asked(store), top=2, bottom=1)
    order = (QUERIES @ expected.T).argsort(descending=True)
    assert both.rows.tolist() == order[:, [0, 1, 4]].tolist()
    few = store.query(**asked(store), top=3, bottom=9)
    assert few.rows.tolist() == order.tolist()
    unit = F.normalize(QUERIES) @ F.normalize(expected).T
    cosines = store.query(**asked(store), top=9, unit_norm=True)
    assert torch.allclose(cosines.scores.double(), unit.sort(descending=True).values, atol=1e-5)


@pytest.mark.parametrize("projection", [PerLayer(3), CountSketch(20), Rademacher(20)])
def test_rows_are_projected_as_the_store_says(client: GradClient, projection: Any) -> None:
    store = client.store("projected", model=MODEL, projection=projection, dtype="fp32", seed=4)
    added(store, ["a", "b", "ü"], seed=1)
    assert store.ids() == ["a", "b", "ü"]
    from gradbox import PerSampleGradient

    rows = client.run(
        PerSampleGradient(
            model=MODEL,
            inputs=[samples(3, seed=1)],
            loss=loss,
            loss_inputs={"labels": targets(3)},
            reduce="projection",
            kind=projection.kind,
            dim=projection.dim,
            seed=4,
        )
    ).projection()
    assert torch.allclose(store.rows[:].double(), rows.double(), atol=1e-6)
    hits = store.query(**asked(store), top=1)
    assert [len(some) for some in hits.ids] == [1] * 4


def test_rows_are_at_the_weights_of_a_run(client: GradClient) -> None:
    run = client.train(MODEL, optimizer=Optimizer("sgd", lr=0.5))
    run.step(inputs=[samples(3, seed=1)], loss=lambda z: z.square().mean())
    store = client.store("trained", model=MODEL, weights=run, dtype="fp32")
    x = samples(3, seed=1)
    store.add(inputs=[x], loss=loss, loss_inputs={"labels": targets(3)}, ids=[1, 2, 3])
    model = mlp()
    model.load_state_dict({name: torch.as_tensor(w) for name, w in run.weights().items()})
    expected = rows_of(x, targets(3), model=model)
    assert torch.allclose(store.rows[:].double(), expected, atol=1e-6)
    assert not torch.allclose(expected, rows_of(x, targets(3)), atol=1e-3)
    assert store.query(**asked(store), top=1).ids
    run.delete()


def test_rows_in_sixteen_bits_are_rounded_once(client: GradClient) -> None:
    expected = all_rows((3, 1)).float()
    for dtype, wanted in (("fp16", torch.float16), ("bf16", torch.bfloat16)):
        store = client.store(f"of-{dtype}", model=MODEL, dtype=dtype)
        added(store, [1, 2, 3], seed=1)
        assert store.rows[:].dtype == wanted
        assert torch.allclose(store.rows[:].float(), expected.to(wanted).float(), rtol=2**-7)


def test_an_id_comes_once(client: GradClient) -> None:
    store = client.store("once", model=MODEL)
    added(store, [1, 2, 3], seed=1)
    two = samples(2, seed=2)
    for ids, message in (
        ([7, 3], "lacks, got 3 again"),
        ([7, 7], "each once, got 7 more"),
        (["a", "b"], "expected int"),
        ([21, 22, 23], "one for each of 2 samples"),
    ):
        with pytest.raises(InvalidInputs, match=message):
            store.add(inputs=[two], loss=loss, loss_inputs={"labels": targets(2)}, ids=ids)
    with pytest.raises(InvalidInputs, match="loss: expected that of the rows"):
        store.add(inputs=[two], loss=lambda z: z.square().sum(1), ids=[8, 9])
    assert store.refresh().num_rows == 3
    added(store, [7, 8, 9], seed=2)
    assert store.ids() == [1, 2, 3, 7, 8, 9]


def test_of_two_that_append_one_id_at_once_one_does(box: TestBox, client: GradClient) -> None:
    store = client.store("raced", model=MODEL, projection=PerLayer(3))

    def append(seed: int) -> Exception | None:
        with box.client() as own:
            try:
                added(own.find_store("raced"), [1, 2, 3], seed=seed)
            except InvalidInputs as error:
                return error
        return None

    with box.http(box.owner_token or box.token) as owner, ThreadPoolExecutor(2) as pool:
        owner.put("/v1/operation", json={"mode": "paused"}).raise_for_status()
        try:
            both = [pool.submit(append, seed) for seed in (1, 2)]
            until = time.monotonic() + 60
            while (
                len(list(client.jobs(state="queued"))) < 2
            ):  # neither was refused when it was posted
                assert time.monotonic() < until
                time.sleep(0.01)
        finally:
            owner.put("/v1/operation", json={"mode": "running"}).raise_for_status()
        first, second = (future.result() for future in both)
    lost, won = (first, 2) if first is not None else (second, 1)
    assert "expected rows that the store lacks, got 1, 2, 3 again" in str(lost)
    assert (first is None) != (second is None)
    assert store.refresh().num_rows == 3
    expected = client.store("alone", model=MODEL, projection=PerLayer(3))
    added(expected, [1, 2, 3], seed=won)
    assert torch.equal(store.rows[:], expected.rows[:])


def test_a_store_of_a_name_is_one(client: GradClient) -> None:
    store = client.store("named", model=MODEL, projection=PerLayer(4))
    assert client.store("named", model=MODEL, projection=PerLayer(4)).id == store.id
    with pytest.raises(StoreConflict, match="dtype: your store 'named' has 'fp16', got 'fp32'"):
        client.store("named", model=MODEL, projection=PerLayer(4), dtype="fp32")
    assert client.find_store("named").id == store.id
    with pytest.raises(StoreNotFound, match="OWNER/NAME"):
        client.find_store("nobody/named")
    with pytest.raises(InvalidInputs, match="matches no parameter"):
        client.store("other", model=MODEL, wrt="nothing.*")
    store.delete()
    store.delete()
    with pytest.raises(StoreNotFound):
        store.refresh()


def test_a_store_is_read_by_those_to_whom_it_is_granted(box: TestBox, client: GradClient) -> None:
    store = client.store("granted", model=MODEL)
    added(store, [1, 2, 3], seed=1)
    with box.client(box.other_token) as other:
        with pytest.raises(StoreNotFound):
            other.find_store(f"{store.view.owner}/granted")
        store.grant("*")
        theirs = other.find_store(f"{store.view.owner}/granted")
        assert theirs.view.grants == []
        assert theirs.query(**asked(theirs), top=1).ids
        assert torch.equal(theirs.rows[:], store.rows[:])
        with pytest.raises(StoreNotFound, match="only its owner"):
            added(theirs, [4, 5, 6], seed=2)
        with pytest.raises(StoreNotFound, match="only its owner"):
            theirs.delete()
        with pytest.raises(StoreNotFound, match="only its owner"):
            theirs.grant("me")
        store.revoke("*")
        with pytest.raises(StoreNotFound):
            theirs.query(**asked(theirs))
        with pytest.raises(StoreNotFound):
            _ = theirs.rows[:]


def test_an_exported_store_holds_the_rows_with_their_ids(
    client: GradClient, tmp_path: Path
) -> None:
    store = client.store("exported", model=MODEL)
    added(store, [5, 6, 7], seed=1)
    added(store, [8, 9], seed=2)
    folder = store.export(tmp_path / "store")
    parts = [load_file(path) for path in sorted(folder.glob("*.safetensors"))]
    assert torch.cat([part["samples/ids"] for part in parts]).tolist() == [5, 6, 7, 8, 9]
    rows = torch.cat([part["samples/projection"] for part in parts])
    assert torch.equal(rows, store.rows[:])
    shutil.rmtree(folder)


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
def test_an_exported_store_is_read_as_bergson_reads_its_own(
    client: GradClient, tmp_path: Path, dtype: Any
) -> None:
    store = client.store("exported", model=MODEL, projection=PerLayer(3), dtype=dtype)
    added(store, ["a", "b", "c"], seed=1)
    added(store, ["d", "e"], seed=2)
    folder = store.export(tmp_path / "store", form="bergson")
    # As `load_gradients` and `column_offsets` of bergson 2.5 do, in whose place NumPy is here.
    info = json.loads((folder / "info.json").read_text())
    base = np.uint16 if info["base_dtype"] == "bfloat16" else np.dtype(info["base_dtype"])
    shape = info["num_grads"], sum(info["grad_sizes"].values())
    found = np.memmap(folder / "gradients.bin", dtype=base, mode="r", shape=shape)
    rows = store.rows[:].view(torch.uint16) if dtype == "bf16" else store.rows[:]
    assert torch.equal(torch.from_numpy(np.array(found)), rows)
    assert list(info["grad_sizes"]) == [name for name, _ in mlp().named_parameters()]
    assert json.loads((folder / "ids.json").read_text()) == ["a", "b", "c", "d", "e"]
    first = info["grad_sizes"]["0.weight"]
    bias = store.rows[:][:, first : first + info["grad_sizes"]["0.bias"]]
    alone = client.store("bias", model=MODEL, wrt="0.bias", projection=PerLayer(3), dtype=dtype)
    added(alone, ["a", "b", "c"], seed=1)
    assert torch.equal(bias[:3], alone.rows[:])
