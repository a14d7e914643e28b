"""Gradients in 16 bits on the wire: what is rounded, and how far it is off by the receipt."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from gradbox import (
    Cotangents,
    Forward,
    Gradient,
    GradResult,
    InvalidInputs,
    InvalidJob,
    Jacobian,
    JobFailed,
    PerSampleGradient,
)
from gradbox.tensors.safetensors_header import read_header
from tests import case_models
from tests.boxes import TestBox
from tests.client.remote import NaiveModel
from tests.client.test_mixed import mixed
from tests.client.test_per_sample import PROBLEMS, gradient_of, normal
from tests.mixed_cases import MIXED_CASES

FORMATS = {"bf16": ("BF16", 2.0**-8), "fp16": ("F16", 2.0**-11)}
HALF: dict[str, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16}
SHARDS = list(normal(7, 5).split(4))


def squared(z: Tensor, scale: Tensor) -> Tensor:
    return scale * z.square().sum()


def job(**given: Any) -> Gradient:
    return Gradient(
        model="mlp",
        inputs=SHARDS,
        loss=squared,
        loss_inputs={"scale": torch.tensor(1.7, requires_grad=True)},
        returns=("grads", "input_grads", "outputs"),
        **given,
    )


def once(exact: Tensor, transfer: str) -> Tensor:
    """Return a tensor rounded to the format and widened again."""
    return exact.to(HALF[transfer]).to(exact.dtype)


def relative(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact.double()).norm() / exact.double().norm())


@pytest.mark.parametrize("transfer", FORMATS)
def test_gradients_come_rounded_once_in_the_dtype_they_had(twin: TestBox, transfer: str) -> None:
    exact, rounded = twin.result_of(job()), twin.result_of(job(transfer=transfer))
    assert "loss_inputs.scale" in rounded.names
    for found, expected in ((rounded.grads, exact.grads), (rounded.input_grads, exact.input_grads)):
        assert list(found) == list(expected)
        for name, gradient in found.items():
            assert gradient.dtype == expected[name].dtype
            assert torch.equal(gradient, once(expected[name], transfer))
    assert torch.equal(rounded.outputs["z"], exact.outputs["z"])
    assert rounded.loss == exact.loss


@pytest.mark.parametrize("transfer", FORMATS)
def test_the_receipt_states_the_rounding(twin: TestBox, transfer: str) -> None:
    exact, rounded = twin.result_of(job()), twin.result_of(job(transfer=transfer))
    errors = [relative(rounded.grads[name], exact.grads[name]) for name in exact.names]
    errors += [relative(rounded.input_grads[n], x) for n, x in exact.input_grads.items()]
    assert rounded.manifest.transfer == transfer
    bound = FORMATS[transfer][1]
    assert 0 < max(errors) < bound <= rounded.manifest.transfer_error < 1.5 * bound
    assert exact.manifest.transfer is exact.manifest.transfer_error is None
    assert "transfer error" in rounded.manifest._repr_html_()


def test_gradients_are_within_the_rounding_of_the_oracle(twin: TestBox) -> None:
    model, scale = case_models.mlp().eval(), torch.tensor(1.7)
    squared(model(torch.cat(SHARDS)), scale).backward()
    for transfer, (_, bound) in FORMATS.items():
        found = twin.result_of(job(transfer=transfer))
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            assert relative(found.grads[name], parameter.grad) < bound


def test_the_file_holds_half_the_bytes(twin: TestBox, tmp_path: Path) -> None:
    for transfer, (tag, _) in FORMATS.items():
        twin.result_of(job(transfer=transfer)).save(tmp_path / transfer)
        header = read_header(tmp_path / transfer)
        gradients = [n for n in header.tensors if n.split("/")[0] in ("grads", "input_grads")]
        assert {header.tensors[name].dtype for name in gradients} == {tag}
        dtypes = {n: "F32" if n.endswith("scale") else "F64" for n in gradients}
        assert json.loads(header.metadata["gradbox_rounded"]) == dtypes
        again = GradResult.load(tmp_path / transfer)
        assert again.grads["0.weight"].dtype == torch.float64


@pytest.mark.parametrize("transfer", FORMATS)
def test_numpy_alone_gives_the_same_numbers(
    twin: TestBox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, transfer: str
) -> None:
    result = twin.result_of(job(transfer=transfer))
    result.save(tmp_path / "result")
    expected = {name: np.asarray(result.grads[name]) for name in result.names}
    with twin.client() as client:
        opened = client.job(result.manifest.job).open()
        monkeypatch.setitem(sys.modules, "torch", None)
        for found in (GradResult.load(tmp_path / "result"), opened):
            for name, gradient in found.numpy().items():
                assert gradient.dtype == expected[name].dtype
                assert np.array_equal(gradient, expected[name])


def test_a_gradient_that_fp16_does_not_hold_stays_as_it_is(twin: TestBox) -> None:
    given = {"model": "mlp", "inputs": SHARDS, "loss": lambda z: 1e6 * z.square().sum()}
    exact = twin.result_of(Gradient(**given))
    rounded = twin.result_of(Gradient(**given, transfer="fp16"))
    beyond = [n for n in exact.names if exact.grads[n].abs().max() > 65504]
    assert beyond
    assert rounded.manifest.transfer_kept == beyond
    for name in beyond:
        assert torch.equal(rounded.grads[name], exact.grads[name])
    assert twin.result_of(Gradient(**given, transfer="bf16")).manifest.transfer_kept == []


def test_what_16_bits_do_not_hold_at_all_is_bounded_by_one(twin: TestBox) -> None:
    tiny = Gradient(
        model="mlp", inputs=SHARDS, loss=lambda z: 1e-200 * z.square().sum(), transfer="bf16"
    )
    rounded = twin.result_of(tiny)
    assert not any(gradient.any() for gradient in rounded.grads.values())
    assert rounded.manifest.transfer_error == pytest.approx(1.0)


def test_rows_come_rounded_whole_and_in_slices(box: TestBox) -> None:
    problem = PROBLEMS["mlp"]
    exact = box.result_of(gradient_of(problem))
    rounded = box.result_of(gradient_of(problem, transfer="bf16"))
    rows = []
    for name in exact.names:
        expected = once(exact.grads[name], "bf16")
        assert rounded.grads[name].dtype == torch.float64
        assert torch.equal(rounded.grads[name], expected)
        rows += [relative(expected[b], exact.grads[name][b]) for b in range(len(expected))]
    assert max(rows) < rounded.manifest.transfer_error == pytest.approx(2.0**-8)
    with box.client() as client:
        weight = client.job(rounded.manifest.job).open().grads["0.weight"]
        assert weight.dtype == torch.float64
        assert torch.equal(weight[2:4], rounded.grads["0.weight"][2:4])


def test_rows_that_fp16_does_not_hold_end_the_job(twin: TestBox) -> None:
    given = PerSampleGradient(
        model="mlp",
        inputs=SHARDS,
        loss=lambda z: 1e6 * z.square().sum(1),
        transfer="fp16",
    )
    with pytest.raises(InvalidInputs, match=r"up to 65504, got .* use transfer='bf16'") as caught:
        twin.result_of(given)
    assert isinstance(caught.value, JobFailed)


def test_a_clipped_sum_is_rounded_and_its_norms_are_not(twin: TestBox) -> None:
    given: dict[str, Any] = {"reduce": "clipped_sum", "clip": 0.5}
    exact = twin.result_of(gradient_of(PROBLEMS["mlp"], **given))
    rounded = twin.result_of(gradient_of(PROBLEMS["mlp"], **given, transfer="bf16"))
    for name in exact.names:
        assert torch.equal(rounded.grads[name], once(exact.grads[name], "bf16"))
    assert torch.equal(rounded.norms(), exact.norms())


def test_a_mixed_gradient_is_rounded(twin: TestBox) -> None:
    case = MIXED_CASES["mlp, cubic"]()
    exact, rounded = (
        twin.result_of(
            mixed(case, "mixed_inplace_mlp", returns=("grads", "dfdz"), transfer=transfer),
        )
        for transfer in ("exact", "bf16")
    )
    for name in exact.names:
        assert torch.equal(rounded.grads[name], once(exact.grads[name], "bf16"))
    assert torch.equal(rounded.dfdz, exact.dfdz)
    assert rounded.manifest.transfer_error == pytest.approx(FORMATS["bf16"][1])


@pytest.mark.parametrize(
    ("computation", "match"),
    [
        (lambda: Forward(model="mlp", inputs=SHARDS, transfer="bf16"), "outputs are never rounded"),
        (
            lambda: Jacobian(model="mlp", inputs=SHARDS, form="factored", transfer="bf16"),
            "take form='dense'",
        ),
        (
            lambda: Jacobian(model="mlp", inputs=SHARDS, reduce="gram", transfer="bf16"),
            "holds no gradients",
        ),
        (lambda: job(transfer="fp8"), "'exact', 'bf16' or 'fp16'"),
    ],
)
def test_where_nothing_is_rounded_it_is_refused(
    twin: TestBox, computation: Any, match: str
) -> None:
    with pytest.raises(InvalidJob, match=match):
        twin.result_of(computation())


def test_weights_may_come_in_the_format_and_are_widened(twin: TestBox) -> None:
    model = case_models.mlp()
    halves = {name: p.detach().bfloat16() for name, p in model.named_parameters()}
    given = {"model": "mlp", "inputs": SHARDS, "loss": lambda z: z.square().sum()}
    wide = {name: half.double() for name, half in halves.items()}
    exact = twin.result_of(Gradient(**given, weights=wide))
    rounded = twin.result_of(Gradient(**given, weights=halves, transfer="bf16"))
    assert rounded.loss == exact.loss
    assert rounded.manifest.weights_widened == len(halves)
    with pytest.raises(JobFailed, match="bfloat16; convert it"):
        twin.result_of(Gradient(**given, weights=halves))
    with pytest.raises(JobFailed, match="bfloat16; convert it"):
        twin.result_of(Gradient(**given, weights=halves, transfer="fp16"))


def test_cotangents_bring_gradients_in_the_format(twin: TestBox) -> None:
    forward = twin.result_of(Forward(model="mlp", inputs=SHARDS))
    loss = Cotangents(torch.ones_like(forward.outputs["z"]), of=forward)
    exact, rounded = (
        twin.result_of(Gradient(loss=loss, transfer=transfer)) for transfer in ("exact", "bf16")
    )
    for name in exact.names:
        assert torch.equal(rounded.grads[name], once(exact.grads[name], "bf16"))


def test_a_remote_model_sends_and_fetches_halves(box: TestBox) -> None:
    local = case_models.mlp()
    naively = NaiveModel(case_models.mlp())
    with torch.no_grad():
        for parameter in naively.module.parameters():
            parameter.copy_(parameter.bfloat16())
    with box.client() as client:
        f = client.model("mlp", weights=dict(local.named_parameters()), transfer="bf16")
        loss = torch.cat([f(x) for x in SHARDS]).square().sum()
        loss.backward()
    expected = torch.cat([naively(x) for x in SHARDS]).square().sum()
    expected.backward()
    torch.testing.assert_close(loss, expected)
    for name, gradient in f.grads.items():
        assert gradient.dtype == torch.float64
        assert relative(gradient, naively.grads[name]) < 2.0**-8


def test_a_remote_model_leaves_buffers_and_what_overflows_as_they_are() -> None:
    from gradbox.remote.state import rounded_weights

    weights = {
        "w": torch.tensor([1.0 + 2**-12]),
        "huge": torch.tensor([1e5]),
        "running_mean": torch.tensor([1.0 + 2**-12]),
        "array": np.ones(2, dtype=np.float32),
    }
    found = rounded_weights(weights, {"w", "huge", "array"}, transfer="fp16")
    assert found["w"].dtype == found["array"].dtype == torch.float16
    assert found["huge"] is weights["huge"]
    assert found["running_mean"] is weights["running_mean"]
    assert rounded_weights(weights, {"w"}, transfer="exact") is weights
