"""A parameter that a model holds under two names goes by either in a job."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gradbox import Gradient, InvalidInputs, Jacobian, LossNotFinite, PerSampleGradient
from tests import case_models
from tests.boxes import TestBox
from tests.oracle import TOLERANCE, difference

WAIT_S = 120.0
FIRST, SECOND = "embedding.weight", "out.weight"
TOKENS = torch.arange(20).reshape(5, 4) % 11
GIVEN: dict[str, Any] = {"model": "transformer", "inputs": [TOKENS[:3], TOKENS[3:]]}


def mean_square(z: Tensor) -> Tensor:
    return z.square().mean()


def squares(z: Tensor) -> Tensor:
    return z.flatten(1).square().sum(1)


def trained() -> nn.Module:
    """The registered model after a step of training."""
    model = case_models.transformer().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    return model


def test_the_state_of_a_model_with_tied_weights_is_laid_over(box: TestBox) -> None:
    model = trained()
    assert {FIRST, SECOND} <= model.state_dict().keys()
    mean_square(model(TOKENS)["logits"]).backward()
    job = Gradient(**GIVEN, output="logits", loss=mean_square, weights=model.state_dict())
    result = box.result_of(job)
    assert difference(result.grads, {n: p.grad for n, p in model.named_parameters()}) <= TOLERANCE


def test_the_second_name_alone_is_enough(twin: TestBox) -> None:
    given = {**GIVEN, "output": "logits", "loss": mean_square}
    weight = trained().state_dict()[FIRST]
    first, second = (
        twin.result_of(Gradient(**given, weights={name: weight}, wrt=name))
        for name in (FIRST, SECOND)
    )
    assert list(first.grads) == list(second.grads) == [FIRST]
    assert torch.equal(first.grads[FIRST], second.grads[FIRST])


def test_rows_are_selected_by_either_name(twin: TestBox) -> None:
    jobs = [
        cls(**GIVEN, output="hidden", wrt=name, form="dense", **more)
        for cls, more in ((PerSampleGradient, {"loss": squares}), (Jacobian, {}))
        for name in (FIRST, "out")
    ]
    rows = [twin.result_of(job).grads for job in jobs]
    assert [list(found) for found in rows] == [[FIRST]] * len(jobs)
    assert torch.equal(rows[0][FIRST][:], rows[1][FIRST][:])
    assert torch.equal(rows[2][FIRST][:], rows[3][FIRST][:])


@pytest.mark.parametrize(("transfer", "near"), [("exact", TOLERANCE), ("bf16", 2e-2)])
def test_the_state_of_a_remote_model_may_have_both_names(
    twin: TestBox, transfer: Any, near: float
) -> None:
    model = trained()
    mean_square(model(TOKENS)["logits"]).backward()
    with twin.client() as client:
        f = client.model(
            "transformer", output="logits", weights=model.state_dict(), transfer=transfer
        )
        mean_square(f(TOKENS)).backward()
    assert difference(f.grads, {n: p.grad for n, p in model.named_parameters()}) <= near


def test_two_names_with_the_same_nan_are_one_tensor(twin: TestBox) -> None:
    weights = {name: tensor.clone() for name, tensor in trained().state_dict().items()}
    for name in (FIRST, SECOND):
        weights[name][-1] = torch.nan
    job = Gradient(**GIVEN, output="logits", loss=mean_square, weights=weights)
    with twin.client() as client, pytest.raises(LossNotFinite):
        client.submit(job).result(WAIT_S)


def test_two_names_with_different_numbers_are_refused(twin: TestBox) -> None:
    weights = trained().state_dict()
    weights = {FIRST: weights[FIRST], SECOND: weights[SECOND] + 1}
    job = Gradient(**GIVEN, output="logits", loss=mean_square, weights=weights)
    with twin.client() as client, pytest.raises(InvalidInputs, match="one tied tensor"):
        client.submit(job).result(WAIT_S)
