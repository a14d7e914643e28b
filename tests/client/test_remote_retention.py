"""Graphs that wait on the box between the halves of a step: seen in manifests and nowhere else."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
import torch
from torch import Tensor

from gradbox import GradClient, Gradient
from gradbox_service.http.bodies import is_form, read_parts
from tests import case_models
from tests.boxes import TestBox
from tests.client.remote import NaiveModel
from tests.client.test_remote_oracle import branching, shards_of
from tests.oracle import TOLERANCE, difference


def retained(client: GradClient, num_jobs: int) -> list[tuple[int, int]]:
    """Return shards retained and replayed of the newest gradient jobs, in the order they ran."""
    jobs = [job for job in client.jobs(limit=2 * num_jobs) if job.view.computation == "gradient"]
    manifests = [job.result().manifest for job in jobs[:num_jobs]]
    return [(m.shards_retained or 0, m.shards_replayed or 0) for m in reversed(manifests)]


def images(*sizes: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(n, 2, 6, 6, generator=generator, dtype=torch.float64) for n in sizes]


@pytest.mark.parametrize(("retain", "expected"), [("auto", (3, 0)), (10**9, (3, 0)), (0, (3, 0))])
def test_a_step_replays_only_what_could_not_be_kept(
    box: TestBox, retain: Any, expected: tuple[int, int]
) -> None:
    shards = images(4, 3, 3)
    naive = NaiveModel(case_models.cnn(), mode="train", seed=5)
    branching(torch.cat([naive(x) for x in shards])).backward()
    with box.client() as client:
        f = client.model("cnn", mode="train", seed=5, retain=retain)
        branching(torch.cat([f(x) for x in shards])).backward()
        assert retained(client, 1) == [expected]
    assert difference(f.grads, naive.grads) <= TOLERANCE
    for name, buffer in naive.module.named_buffers():
        torch.testing.assert_close(f.buffers[name], buffer, rtol=TOLERANCE, atol=TOLERANCE)


def test_what_was_kept_changes_no_bit(box: TestBox) -> None:
    found = []
    with box.client() as client:
        for retain in ("auto", 0):
            f = client.model("inplace_mlp", mode="train", seed=2, retain=retain)
            xs = [x.requires_grad_() for x in shards_of(4, 3)]
            branching(torch.cat([f(x) for x in xs])).backward()
            found.append((f.grads, [x.grad for x in xs]))
        assert retained(client, 2) == [(2, 0), (0, 2)]
    (grads, input_grads), (expected, expected_inputs) = found
    assert all(torch.equal(grads[name], gradient) for name, gradient in expected.items())
    assert all(torch.equal(a, b) for a, b in zip(input_grads, expected_inputs, strict=True))


def test_two_models_in_several_batches_keep_what_they_need(box: TestBox) -> None:
    shards = shards_of(4, 3, 2)

    def loss(f: Any, g: Any) -> Tensor:
        first = [f(x) for x in shards]
        total = torch.cat(first).square().sum()  # sends the first batch
        f.train()
        others = [(f(x), g(x)) for x in shards]
        return total + sum((z * y).square().sum() for z, y in others)

    student, teacher = NaiveModel(case_models.inplace_mlp()), NaiveModel(case_models.mlp())
    student.train = student.module.train  # type: ignore[attr-defined]
    loss(student, teacher).backward()
    with box.client() as client:
        f, g = client.model("inplace_mlp"), client.model("mlp")
        loss(f, g).backward()
        assert retained(client, 3) == [(3, 0)] * 3
    assert difference(f.grads, student.grads) <= TOLERANCE
    assert difference(g.grads, teacher.grads) <= TOLERANCE


def test_each_call_has_its_own_backward_pass(box: TestBox) -> None:
    shards = shards_of(2, 3, 1)
    naive = NaiveModel(case_models.mlp())
    sum(naive(x).exp().sum() for x in shards).backward()
    with box.client() as client:
        f = client.model("mlp")
        for x, z in [(x, f(x.requires_grad_())) for x in shards]:
            z.exp().sum().backward()
            assert x.grad is not None
        assert retained(client, 3) == [(1, 0)] * 3
    assert difference(f.grads, naive.grads) <= TOLERANCE


def test_a_second_backward_pass_is_replayed(twin: TestBox) -> None:
    with twin.client() as client:
        f = client.model("mlp")
        loss = f(shards_of(4)[0]).square().sum()
        loss.backward(retain_graph=True)
        once = f.grads
        loss.backward()
        assert retained(client, 2) == [(1, 0), (0, 1)]
    assert all(torch.equal(f.grads[name], 2 * gradient) for name, gradient in once.items())


def test_a_job_in_between_only_costs_time(twin: TestBox) -> None:
    naive = NaiveModel(case_models.inplace_mlp(), mode="train")
    shards = shards_of(4, 3)
    branching(torch.cat([naive(x) for x in shards])).backward()
    with twin.client() as client:
        f = client.model("inplace_mlp", mode="train")
        loss = branching(torch.cat([f(x) for x in shards]))
        client.submit(Gradient(model="mlp", inputs=shards, loss=torch.sum)).result()
        loss.backward()
        assert retained(client, 1) == [(0, 2)]
    assert difference(f.grads, naive.grads) <= TOLERANCE


def test_forward_jobs_say_what_will_be_differentiated(
    twin: TestBox, monkeypatch: pytest.MonkeyPatch
) -> None:
    posted: list[dict[str, Any]] = []
    send = httpx.Client.send

    def watched(self: httpx.Client, request: httpx.Request, **given: Any) -> httpx.Response:
        if request.method == "POST":
            body, content_type = request.read(), request.headers["Content-Type"]
            form = is_form(content_type)
            job = read_parts(body, content_type=content_type).job if form else body
            posted.append(json.loads(job))
        return send(self, request, **given)

    monkeypatch.setattr(httpx.Client, "send", watched)
    (x,) = shards_of(2)
    with twin.client() as client:
        f = client.model("mlp", wrt="4.*", retain=5000)
        _ = f(x.requires_grad_()).shape
        with torch.no_grad():
            _ = f(x).shape
    recorded, unrecorded = ((job.get("wrt"), job.get("retain", 0)) for job in posted)
    assert recorded == (["4.*", "inputs.z0.0"], 5000)
    assert unrecorded == (["4.*"], 0)
