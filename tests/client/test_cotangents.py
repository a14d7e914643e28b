"""`Forward`, a loss on this side, and `Gradient(loss=Cotangents(...))`, on both boxes."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from safetensors.numpy import save
from torch import Tensor

from gradbox import Cotangents, Forward, Gradient, GradResult, InvalidInputs, InvalidJob
from gradbox_engine import shard_stream
from tests import case_models
from tests.boxes import TestBox
from tests.cases import CASES, Case
from tests.oracle import TOLERANCE, difference, naive

WAIT_S = 120.0


def forward_of(case: Case, **given: Any) -> Forward:
    return Forward(
        model=case.model.__name__,
        inputs=case.groups if case.groups.keys() != {"z"} else case.groups["z"],
        method=case.methods or "forward",
        output=case.output,
        readout=case.readout,
        mode=case.mode,
        seed=case.seed,
        **given,
    )


def outputs_of(result: GradResult) -> dict[str, Tensor]:
    return {name: z.clone().requires_grad_() for name, z in result.outputs.items()}


def by_group(outputs: dict[str, Tensor]) -> dict[str, Any]:
    groups: dict[str, Any] = {}
    for key, z in outputs.items():
        group, _, name = key.partition("/")
        if name:
            groups.setdefault(group, {})[name] = z
        else:
            groups[group] = z
    return groups


@pytest.mark.parametrize("name", CASES)
def test_a_loss_on_this_side_gives_the_gradients_of_naive_code(box: TestBox, name: str) -> None:
    case = CASES[name]()
    expected = naive(CASES[name]())
    with box.client() as client:
        forward = client.submit(forward_of(case))
        leaves = outputs_of(forward.result(WAIT_S))
        groups = by_group(leaves)
        loss = (
            case.loss(*groups.values(), **case.loss_inputs)
            if len(groups) == 1
            else case.loss(**groups, **case.loss_inputs)
        )
        found = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
        cotangents = {n: g for n, g in zip(leaves, found, strict=True) if g is not None}
        result = client.submit(
            Gradient(loss=Cotangents(cotangents, of=forward), wrt=case.wrt)
        ).result(WAIT_S)
    # The loss's own gradients stand on both sides, for the size that rounding is measured by.
    of_loss = {n: g for n, g in expected.grads.items() if n.startswith("loss")}
    assert difference({**result.grads, **of_loss}, expected.grads) <= TOLERANCE
    assert result.manifest.replay_difference == 0
    assert set(result.manifest.unreached) == {
        n for n in expected.unreached if not n.startswith("loss")
    }
    assert result.manifest.loss is None


def test_order_is_that_of_the_forward_job(box: TestBox) -> None:
    x = torch.randn(5, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    order = torch.tensor([4, 2, 0, 1, 3])
    weight = torch.arange(5.0, dtype=torch.float64)[:, None]
    with box.client() as client:
        forward = client.submit(Forward(model="mlp", inputs=[x[:2], x[2:]], order=order))
        z = forward.result(WAIT_S).outputs["z"]
        job = client.submit(Gradient(loss=Cotangents(weight.expand_as(z), of=forward)))
        grads = job.result(WAIT_S).grads
    model = case_models.mlp()
    (model(x)[order] * weight).sum().backward()
    expected = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert difference(grads, expected) <= TOLERANCE


def test_a_stream_may_be_given_to_a_shard(twin: TestBox) -> None:
    x = np.ones((2, 5))
    content = save({"0": x})
    digest = hashlib.sha256(content).hexdigest()
    with twin.http() as http, twin.client() as client:
        http.put(f"/v1/blobs/{digest}", content=content).raise_for_status()
        posted = http.post(
            "/v1/jobs",
            json={
                "computation": "forward",
                "model": "mlp",
                "mode": "train",
                "inputs": [{"shards": [{"blob": digest, "stream": [0, 7]}]}],
            },
        )
        assert posted.status_code == 202, posted.text
        z = client.job(posted.json()["id"]).result(WAIT_S).outputs["z"]
    with shard_stream(0, group=0, shard=7):
        expected = case_models.mlp().train()(torch.from_numpy(x))
    torch.testing.assert_close(z, expected.detach())


@pytest.fixture
def forward_id(twin: TestBox) -> str:
    with twin.client() as client:
        job = client.submit(Forward(model="mlp", inputs=[torch.ones(2, 5).double()]))
        job.wait(WAIT_S)
        return job.id


def refused(box: TestBox, cotangents: Cotangents, *, token: str | None = None) -> str:
    with box.client(token) as client, pytest.raises(InvalidInputs) as caught:
        client.submit(Gradient(loss=cotangents))
    return str(caught.value)


def test_a_cotangent_of_another_shape_is_refused(twin: TestBox, forward_id: str) -> None:
    message = refused(twin, Cotangents(torch.ones(3, 3), of=forward_id))
    assert "[2, 3]" in message
    assert "[3, 3]" in message


def test_a_cotangent_of_another_group_is_refused(twin: TestBox, forward_id: str) -> None:
    message = refused(twin, Cotangents({"queries": torch.ones(2, 3)}, of=forward_id))
    assert "'queries'" in message
    assert "['z']" in message


def test_a_cotangent_of_whole_numbers_is_refused(twin: TestBox, forward_id: str) -> None:
    message = refused(twin, Cotangents(torch.ones(2, 3, dtype=torch.int64), of=forward_id))
    assert "I64" in message


def test_somebody_elses_forward_job_is_refused(twin: TestBox, forward_id: str) -> None:
    message = refused(twin, Cotangents(torch.ones(2, 3), of=forward_id), token=twin.other_token)
    assert "of yours" in message


def test_a_job_that_is_no_forward_is_refused(twin: TestBox) -> None:
    with twin.client() as client:
        job = client.submit(
            Gradient(
                model="mlp", inputs=[torch.ones(2, 5).double()], loss=lambda z: z.square().sum()
            )
        )
        job.wait(WAIT_S)
        message = refused(twin, Cotangents(torch.ones(2, 3), of=job))
    assert "gradient" in message


def test_a_forward_job_that_failed_is_refused(twin: TestBox) -> None:
    with twin.client() as client:
        job = client.submit(Forward(model="mlp", inputs=[torch.ones(2, 9).double()]))
        job.wait(WAIT_S)
    assert "failed" in refused(twin, Cotangents(torch.ones(2, 3), of=job))


@pytest.mark.parametrize(
    "field", [{"seed": 1}, {"mode": "train"}, {"model": "mlp"}, {"weights": {}}]
)
def test_what_the_forward_job_settled_cannot_be_said_again(
    twin: TestBox, forward_id: str, field: dict[str, object]
) -> None:
    loss = {"kind": "cotangents", "forward": forward_id, "tensors": {}}
    with twin.http() as http:
        answer: httpx.Response = http.post(
            "/v1/jobs", json={"computation": "gradient", "loss": loss, **field}
        )
    assert answer.status_code == 422
    assert f"{next(iter(field))}: expected none of these" in answer.json()["detail"]


def test_the_client_says_so_before_it_posts() -> None:
    with pytest.raises(InvalidJob, match="seed"):
        Gradient(loss=Cotangents(torch.ones(2, 3), of="job"), seed=3)


def test_outputs_that_are_gone_are_named(
    twin: TestBox, forward_id: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gradbox_service.admission import earlier_job

    monkeypatch.setattr(
        earlier_job, "checked_header", lambda file: (tmp_path / "none").read_bytes()
    )
    message = refused(twin, Cotangents(torch.ones(2, 3), of=forward_id))
    assert "run the forward job again" in message
