"""What is said of a job before it runs: within 20 % of its receipt, for jobs of all kinds."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from benchmarks.box.estimates import MODELS, WITHIN, Compared, compared, squares, workloads
from gradbox import (
    Cotangents,
    Estimate,
    GradClient,
    Gradient,
    InvalidJob,
    JobState,
    LossNotScalar,
    Optimizer,
    OutOfMemory,
    PerSampleGradient,
)
from gradbox.cli import main
from gradbox_service.backing import Backing
from gradbox_service.http.app import create_app
from gradbox_service.settings import Settings
from gradbox_service.up.embedded_redis import EmbeddedRedis
from tests.boxes import TestBox, running_box
from tests.device import DEVICE
from tests.inprocess import InProcessTransport
from tests.worker.box import Box, running_worker

JOBS = workloads(rows=512)
# Others work on the machine meanwhile: the benchmark says how well seconds are estimated.
TIMES = 20
# Of kinds that others are of, too; the benchmark estimates all.
SLOW = {"gradient, graphs kept", "two groups, InfoNCE, ragged", "transformer, outputs too"}


def write_models(folder: Path) -> Path:
    (folder / "models.py").write_text(MODELS)
    models = folder / "models.toml"
    names = ("wide", "narrow", "convolutions", "tokens")
    models.write_text(
        "\n".join(
            f'[models.{name}]\nbuilder = "python"\nsource = "models.py:{name}"\n' for name in names
        )
    )
    return models


@pytest.fixture(scope="module")
def box(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestBox]:
    folder = tmp_path_factory.mktemp("estimates")
    with running_box(folder / "data", models=write_models(folder)) as box:
        yield box


@pytest.fixture(scope="module")
def client(box: TestBox) -> Iterator[GradClient]:
    with box.client() as client:
        yield client


def job(*, rows: int = 64, shards: int = 4, model: str = "wide", **given: Any) -> Gradient:
    inputs = [torch.ones(rows, 512) for _ in range(shards)]
    return Gradient(**{"model": model, "inputs": inputs, "loss": squares, **given})


def check(found: Compared) -> None:
    said = found.estimate
    assert said.fits
    assert abs(found.off["peak"]) <= WITHIN, found
    assert abs(found.off["result"]) <= WITHIN, found
    assert said.seconds is not None
    assert found.seconds / TIMES <= said.seconds <= found.seconds * TIMES, found
    assert said.upload_bytes > 0
    assert (said.queue_position, said.waits_s, said.advice) == (0, 0.0, "")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in JOBS]
)
def test_an_estimate_is_near_the_receipt(name: str, client: GradClient) -> None:
    check(compared(client, name, JOBS[name]))


def test_a_receipt_holds_estimate_and_truth(client: GradClient) -> None:
    estimate = client.estimate(job())
    receipt = client.run(job(seed=5, name="another", retain=0)).manifest
    assert receipt.estimate is not None
    assert receipt.estimate.peak_bytes == estimate.peak_bytes
    assert abs(receipt.estimate.peak_bytes / receipt.peak_memory_bytes - 1) <= WITHIN


def test_an_estimate_is_kept_for_jobs_of_its_shapes_and_settings(client: GradClient) -> None:
    client.estimate(job(rows=65))
    like = client.submit(job(rows=65, inputs=[torch.zeros(65, 512)] * 4))
    assert like.view.estimate is not None
    for other in (job(rows=66), job(rows=65, mode="train"), job(rows=65, shards=3)):
        assert client.submit(other).view.estimate is None


def test_graphs_are_counted_as_retain_keeps_them(client: GradClient) -> None:
    kept, none = client.estimate(job()), client.estimate(job(retain=0))
    assert (kept.shards_retained, none.shards_retained) == (4, 1)
    assert kept.peak_retained_bytes > kept.peak_bytes
    assert none.peak_retained_bytes == none.peak_bytes


def test_what_fails_in_the_job_fails_in_its_estimate(client: GradClient) -> None:
    with pytest.raises(LossNotScalar):
        client.estimate(job(loss=lambda z: z.square()))


def test_a_gradient_at_cotangents_is_not_estimated(client: GradClient) -> None:
    at = Gradient(loss=Cotangents({"z": torch.ones(1)}, of="some-job"))
    with pytest.raises(InvalidJob, match="expected a computation with its loss"):
        client.estimate(at)


def test_a_client_without_a_box_estimates_too() -> None:
    rows = PerSampleGradient(
        model="mine",
        inputs=[torch.ones(4, 512)] * 3,
        loss=lambda z: z.square().sum(1),
        form="dense",
    )
    with GradClient.local({"mine": torch.nn.Linear(512, 8)}) as client:
        for computation, losses_bytes in ((job(model="mine"), 0), (rows, 3 * 4 * 4)):
            estimate = client.estimate(computation)
            assert (estimate.fits, estimate.queue_position) == (True, 0)
            grads = client.run(computation).grads.values()
            assert estimate.result_bytes == sum(grad.nbytes for grad in grads) + losses_bytes


def test_to_estimate_a_step_makes_none(client: GradClient) -> None:
    run = client.train("wide", optimizer=Optimizer("sgd", lr=0.1))
    given: dict[str, Any] = {"inputs": [torch.ones(8, 512)], "loss": squares}
    before = run.weights()
    estimate = run.estimate(**given)
    assert run.refresh().num_steps == 0
    assert all(torch.equal(before[name], after) for name, after in run.weights().items())
    assert run.step(**given).manifest.estimate is not None
    assert estimate.result_bytes == 0


def test_an_estimate_says_in_words_what_it_found(client: GradClient) -> None:
    shown = repr(client.estimate(job()))
    assert shown.startswith("<Estimate: fits cpu>")
    for part in (
        "memory",
        "with one graph at a time",
        "s on the device",
        "up, ",
        "it would begin at once",
    ):
        assert part in shown
    assert "advice" not in shown


def test_what_does_not_fit_is_said_with_the_way_out() -> None:
    said = Estimate(
        fits=False,
        peak_bytes=3 * 2**30,
        peak_retained_bytes=3 * 2**30,
        shards_retained=None,
        before_bytes=0,
        most_bytes=2**30,
        seconds=None,
        upload_bytes=2**20,
        result_bytes=0,
        device="cpu",
        device_bytes=2**31,
        queue_position=3,
        waits_s=12.4,
        advice="cut the inputs into smaller shards",
    )
    assert repr(said) == (
        "<Estimate: does not fit cpu>\n"
        "  memory  3 GiB or more, of 1 GiB there are\n"
        "  bytes   1 MiB up\n"
        "  wait    place 3 in the queue, about 12 s\n"
        "  advice  cut the inputs into smaller shards"
    )
    paused = said.model_copy(update={"hold": "paused"})
    assert "no job begins for now: the box is paused" in repr(paused)


def test_an_estimate_of_a_job_file(
    box: TestBox,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("GRADBOX_URL", box.url)
    monkeypatch.setenv("GRADBOX_TOKEN", box.token)
    np.save(tmp_path / "x.npy", np.ones((8, 512), np.float32))
    (tmp_path / "loss.py").write_text("def loss(z):\n    return z.square().mean()\n")
    (tmp_path / "job.toml").write_text(
        'model = "wide"\ninputs = ["x.npy"]\nloss = {function = "loss.py:loss"}\n'
    )
    command = ["submit", str(tmp_path / "job.toml"), "--estimate"]
    assert main(command) == 0
    assert "<Estimate: fits cpu>" in capsys.readouterr().out
    assert main([*command, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["fits"] is True


def test_an_estimate_by_plain_http_is_a_field_of_the_job(box: TestBox, client: GradClient) -> None:
    spec = job().prepare().spec
    client.run(job())  # uploads
    with box.http() as http:
        posted = http.post(
            "/v1/jobs",
            json=spec.model_dump(mode="json") | {"estimate": True},
            headers={"Prefer": "wait=30"},
        )
    found = posted.json()
    assert (found["state"], found["estimate"]["fits"]) == (JobState.DONE, True)


@pytest.fixture
def small_box(tmp_path: Path) -> Iterator[GradClient]:
    """A box whose jobs may take 100 MB."""
    redis = EmbeddedRedis.start(tmp_path / "redis", appendfsync="no")
    settings = Settings(data=tmp_path, redis_url=redis.url)
    backing = Backing.on_redis(settings)
    write_models(tmp_path)
    try:
        with running_worker(Box(tmp_path, backing, redis_url=redis.url), "--job-memory-gib", "0.1"):
            transport = InProcessTransport(create_app(settings, backing=backing))
            with GradClient("http://small", backing.tokens.create("ada"), transport=transport) as c:
                yield c
    finally:
        redis.stop()


@pytest.mark.skipif(DEVICE.type != "cpu", reason="the limit is that of a host's memory")
def test_a_job_that_cannot_fit_is_refused_when_it_is_submitted(small_box: GradClient) -> None:
    large = job(rows=8192, shards=2)
    estimate = small_box.estimate(large)
    assert not estimate.fits
    assert estimate.peak_bytes >= estimate.most_bytes
    assert "cut the inputs into smaller shards" in estimate.advice
    with pytest.raises(OutOfMemory, match=r"fit a device of this box.*smaller shards"):
        small_box.submit(large)
    small = job(rows=32, shards=2)
    assert small_box.estimate(small).fits
    assert isinstance(small_box.run(small).grads["head.bias"], Tensor)
