"""Second derivatives through `GradClient`: on the in-process twin, a real box, and without one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gradbox import (
    Cotangents,
    GradClient,
    HessianProduct,
    InvalidInputs,
    InvalidJob,
    InverseHessian,
    NotPositiveDefinite,
    PerSampleGradient,
)
from tests.boxes import TestBox
from tests.cases import Case, smooth
from tests.engine.curving import vectors_of
from tests.oracle import TOLERANCE, curvature_products, difference

WAIT_S = 120.0
REMOTE = ("mlp, labels", "cnn in train", "lstm", "two towers", "transformer, tied logits")


def told(case: Case, **given: Any) -> dict[str, Any]:
    """Return the arguments of a case's products."""
    of_case = {
        "model": case.model.__name__,
        "inputs": case.groups if case.groups.keys() != {"z"} else case.groups["z"],
        "loss": case.loss,
        "loss_inputs": case.loss_inputs,
        "method": case.methods or "forward",
        "output": case.output,
        "readout": case.readout,
        "mode": case.mode,
        "seed": case.seed,
        "wrt": case.wrt,
        "vectors": vectors_of(case),
    }
    return of_case | given


@pytest.mark.parametrize("name", REMOTE)
def test_a_job_returns_what_double_backward_computes(box: TestBox, name: str) -> None:
    case = smooth(name)
    result = box.result_of(HessianProduct(**told(case)))
    assert difference(result.grads, curvature_products(case, vectors_of(case))) <= TOLERANCE
    assert result.manifest.computation == "hessian_product"
    assert (result.manifest.kind, result.manifest.attention) == ("hessian", "math")
    assert result.manifest.shards == {name: len(shards) for name, shards in case.groups.items()}
    assert result.manifest.seconds.products > 0


def solved(case: Case, **given: Any) -> InverseHessian:
    loss = given.pop("loss", cross_entropy)
    return InverseHessian(**told(case, loss=loss, **({"damping": 0.1} | given)))


def cross_entropy(z: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(z, labels)


def test_an_inverse_undoes_the_product(twin: TestBox) -> None:
    case = smooth("mlp, labels")
    result = twin.result_of(solved(case, tolerance=1e-12, max_iterations=200))
    back = twin.result_of(
        HessianProduct(**told(case, loss=cross_entropy, kind="ggn", vectors=result.grads))
    )
    both = {name: back.grads[name] + 0.1 * result.grads[name] for name in result.names}
    assert difference(both, vectors_of(case)) <= 1e-8
    receipt = result.manifest
    assert receipt.damping == 0.1
    assert len(receipt.iterations) == len(receipt.residuals) == 3
    assert max(receipt.residuals) <= 1e-11


def test_negative_curvature_ends_by_name(box: TestBox) -> None:
    job = solved(smooth("mlp, labels"), kind="hessian", damping=0.0)
    with box.client() as client, pytest.raises(NotPositiveDefinite, match="raise damping by more"):
        client.submit(job).result(WAIT_S)


def test_rows_of_samples_are_vectors_without_a_box() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    x_BD, labels_B = torch.randn(20, 6), torch.arange(20) % 3
    shared = {"model": "mlp", "inputs": list(x_BD.split(8)), "loss_inputs": {"labels": labels_B}}

    def of_samples(z: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(z, labels, reduction="none")

    client = GradClient.local({"mlp": model})
    rows = client.run(PerSampleGradient(loss=of_samples, **shared))
    solved = client.run(
        InverseHessian(loss=cross_entropy, vectors=rows.grads, damping=0.01, **shared)
    )
    influence_BB = rows.flat() @ solved.flat().T
    assert influence_BB.shape == (20, 20)
    torch.testing.assert_close(influence_BB, influence_BB.T, rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(solved.gram(), solved.flat() @ solved.flat().T)
    with pytest.raises(InvalidJob, match="estimate the Gradient"):
        client.estimate(HessianProduct(loss=cross_entropy, vectors=rows.grads, **shared))


REFUSED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "no vectors": ({"vectors": {}}, InvalidJob, "vectors"),
    "a bare tensor": ({"vectors": torch.ones(3)}, InvalidInputs, "expected {parameter: tensor}"),
    "an unknown name": ({"vectors": {"w": torch.ones(1, 3)}}, InvalidInputs, "no parameter 'w'"),
    "another shape": (
        {"vectors": {"0.bias": torch.ones(2, 3)}},
        InvalidInputs,
        r"expected the shape \[2, 8\]",
    ),
    "inputs": ({"wrt": "inputs.0"}, InvalidInputs, "differentiates by nothing else"),
    "several devices": ({"devices": 2}, InvalidJob, "devices: Input should be 1"),
    "cotangents": ({"loss": Cotangents(torch.ones(3), of="job")}, InvalidJob, "loss: expected a"),
    "another solver": ({"by": "lissa"}, InvalidJob, "by: Input should be 'cg'"),
    "negative damping": ({"damping": -1.0}, InvalidJob, "damping: Input should be greater"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_refused(twin: TestBox, name: str) -> None:
    given, error, message = REFUSED[name]
    with pytest.raises(error, match=message):
        twin.result_of(solved(smooth("mlp, labels"), **given))
