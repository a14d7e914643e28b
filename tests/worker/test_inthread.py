"""What a worker computes, run in threads of this process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from gradbox.errors import LossNotFinite
from gradbox.protocol import BuiltinLoss, JobState, ProgressView, TensorRef, spec_digest
from tests import case_models
from tests.inthread import InThreadWorker
from tests.valkey import empty_backing
from tests.worker.box import Box, dispatching, register_misbehaving, running, shards_of, traced


def worker_of(
    box: Box, *, models_file: Path | None = None, name: str = "inthread"
) -> InThreadWorker:
    return InThreadWorker(
        models_file or box.models_file,
        records=box.backing.records,
        turns=box.backing.turns,
        fleet=box.backing.fleet,
        blobs=box.backing.blobs,
        results=box.backing.results,
        name=name,
    )


@pytest.fixture(scope="module")
def box(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Box]:
    folder = tmp_path_factory.mktemp("inthread")
    box = Box(folder, empty_backing(folder))
    register_misbehaving(box)
    with dispatching(box.backing), worker_of(box):
        yield box


def test_it_announces_itself_and_its_models(box: Box) -> None:
    (worker,) = box.backing.fleet.workers()
    view = box.backing.fleet.model("m", version=worker.models["m"])
    assert view is not None
    assert view.methods["forward"].arguments == ["x"]


def test_a_job_is_done_with_the_gradient_of_its_loss(box: Box) -> None:
    shards = shards_of(3)
    spec = box.spec(shards)
    record = box.wait(box.submit(spec))
    assert record.state is JobState.DONE, record.error
    tensors, receipt = box.result(record)
    assert receipt.spec_digest == spec_digest(spec)
    torch.manual_seed(0)
    from tests.worker.zoo import Affine

    model = Affine()
    loss = sum((model(shard["x"]) ** 2).sum() for shard in shards)
    loss.backward()
    assert list(receipt.names) == ["linear.weight", "linear.bias"]
    torch.testing.assert_close(tensors["grads/linear.weight"], model.linear.weight.grad)


def test_a_builtin_loss_with_options_and_inputs(box: Box) -> None:
    labels = box.upload({"labels": torch.tensor([0, 1, 0, 1])})
    spec = box.spec(
        shards_of(1),
        loss=BuiltinLoss(name="supervised_contrastive", options={"temperature": 0.2}),
        loss_inputs={"labels": TensorRef(blob=labels, tensor="labels")},
    )
    record = box.wait(box.submit(spec))
    assert record.state is JobState.DONE, record.error


def test_a_loss_input_that_requires_grad_gets_its_gradient(box: Box) -> None:
    weight = box.upload({"w": torch.tensor([1.0, 2.0])})

    def weighted(z: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return (z * w).sum()

    from gradbox.protocol import GraphLoss, TracedFunction
    from gradbox.tracing.trace import trace

    spec = box.spec(
        shards_of(1),
        loss=GraphLoss(
            function=TracedFunction(graph=trace(weighted, positional=1, arguments=["w"]).graph)
        ),
        loss_inputs={"w": TensorRef(blob=weight, tensor="w", requires_grad=True)},
    )
    record = box.wait(box.submit(spec))
    assert record.state is JobState.DONE, record.error
    assert box.result(record)[0]["grads/loss_inputs.w"].shape == (2,)


def test_a_leaf_of_whole_numbers_cannot_have_a_gradient(box: Box) -> None:
    labels = box.upload({"labels": torch.tensor([0, 1, 0, 1])})
    spec = box.spec(
        shards_of(1),
        loss=BuiltinLoss(name="supervised_contrastive"),
        loss_inputs={"labels": TensorRef(blob=labels, tensor="labels", requires_grad=True)},
    )
    error = box.wait(box.submit(spec)).error
    assert error is not None
    assert "labels: expected a floating-point tensor" in error.detail


def test_a_loss_that_is_not_finite_ends_the_job_with_its_own_error(box: Box) -> None:
    def infinite(z: torch.Tensor) -> torch.Tensor:
        return (z / 0.0).sum()

    record = box.wait(box.submit(box.spec(shards_of(1), loss=traced(infinite))))
    assert record.error is not None
    assert isinstance(record.error.error(), LossNotFinite)


def test_a_method_that_the_registry_does_not_allow_is_refused(box: Box) -> None:
    spec = box.spec(shards_of(1))
    group = spec.inputs[0].model_copy(update={"method": "doubled"})
    error = box.wait(box.submit(spec.model_copy(update={"inputs": [group]}))).error
    assert error is not None
    assert error.code == "invalid-inputs"
    assert "entry points (forward), got 'doubled'" in error.detail


def test_a_shard_the_model_refuses_says_which(box: Box) -> None:
    record = box.wait(box.submit(box.spec([*shards_of(1), {"x": torch.ones(2, 5)}])))
    assert record.error is not None
    assert record.error.code == "model-call-failed"


def test_a_running_job_is_cancelled_within_a_shard(box: Box) -> None:
    box.order("sleep")
    job = box.submit(box.spec(shards_of(1) * 200))
    box.wait(job, running)
    box.cancel(job)
    assert box.wait(job).state is JobState.CANCELLED
    told = [event.data for event in box.backing.records.events(job) if event.kind == "progress"]
    assert ProgressView.model_validate_json(told[-1]).done < 150
    (box.folder / "order").unlink()


def test_buffers_come_back_when_asked_for(box: Box) -> None:
    record = box.wait(box.submit(box.spec(shards_of(1), returns=["grads", "buffers"])))
    assert record.state is JobState.DONE, record.error


def test_workers_with_different_models_each_run_their_own_jobs(tmp_path: Path) -> None:
    box = Box(tmp_path, empty_backing(tmp_path))
    register_misbehaving(box)
    other = tmp_path / "other.toml"
    other.write_text(box.models_file.read_text().replace("models.m", "models.other"))
    dispatched = dispatching(box.backing, turn_grace_s=0.05)
    with dispatched, worker_of(box, name="a"), worker_of(box, models_file=other, name="b"):
        jobs = [box.submit(box.spec(shards_of(1), model=m)) for m in ("m", "other") * 4]
        ended = [box.wait(job) for job in jobs]
    assert {record.state for record in ended} == {JobState.DONE}
    assert {(record.model, record.worker) for record in ended} == {("m", "a"), ("other", "b")}
    assert {record.attempt for record in ended} == {1}


def test_jobs_of_workers_beside_each_other_draw_their_own_random_numbers(tmp_path: Path) -> None:
    box = Box(tmp_path, empty_backing(tmp_path))
    entry = f'builder = "python"\nsource = "{case_models.__file__}:inplace_mlp"\n'
    box.models_file.write_text(f"[models.m]\n{entry}")
    other = tmp_path / "other.toml"
    other.write_text(f"[models.other]\n{entry}")
    shards = [{"input": torch.randn(2, 5, dtype=torch.float64)} for _ in range(20)]
    dispatched = dispatching(box.backing, turn_grace_s=0.05)
    with dispatched, worker_of(box, name="a"), worker_of(box, models_file=other, name="b"):
        specs = [box.spec(shards, model=m, mode="train") for m in ("m", "other") * 4]
        ended = [box.wait(job) for job in [box.submit(spec) for spec in specs]]
    first, *others = [box.result(record)[0] for record in ended]
    for gradients in others:
        torch.testing.assert_close(gradients, first, rtol=0, atol=0)
