"""What a job can be told beyond its loss: penalties, memory, precision, order, what to return."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradbox_engine as engine
from gradbox import (
    Forward,
    Gradient,
    InvalidInputs,
    InvalidJob,
    Penalty,
    UntraceableLoss,
)
from gradbox_engine import Group, Objective
from tests import case_models
from tests.boxes import TestBox
from tests.cases import CASES
from tests.client import zoo
from tests.oracle import TOLERANCE, difference

DOUBLE = torch.float64


def mean_square(z: Tensor) -> Tensor:
    return z.square().mean()


def shards_of(case: str) -> list[dict[str, Tensor]]:
    return list(CASES[case]().groups["z"])


def absolute(tap: Tensor) -> Tensor:
    return tap.abs().sum()


def of_some(z: Tensor) -> Tensor:
    return z[:, 0].detach().exp()


TERMS: dict[str, dict[str, Any]] = {
    "nothing but a loss": {},
    "no dropout": {"mode": "eval"},
    "another seed": {"seed": 7},
    "nothing kept": {"retain": 0},
    "everything kept": {"retain": 2**30},
    "fp64": {"precision": "fp64"},
    "streams of samples": {"streams": "sample"},
    "layers that are recomputed": {"recompute": "[02]"},
    "an order": {"order": torch.randperm(14, generator=torch.Generator().manual_seed(0))},
    "weights": {"weights": {"0.weight": torch.full((8, 5), 0.3).double()}},
    "a module's name": {"wrt": ["0"]},
    "modules by a pattern": {"wrt": ["[24]"]},
    "gradients of inputs, and of some parameters": {"wrt": ["inputs.0", "4.*"]},
    "gradients of inputs alone": {"wrt": ["inputs.*"]},
    "a penalty": {"penalties": [Penalty(at="0", loss=absolute, weight=0.3)]},
    "a penalty with a scale for each sample": {
        "penalties": [Penalty(at="0", loss=absolute, per_sample_scale=of_some)]
    },
}


@pytest.mark.parametrize("name", TERMS)
def test_terms_of_a_job_are_those_of_the_engine(box: TestBox, name: str) -> None:
    shards, terms = shards_of("mlp"), {"mode": "train", "seed": 3, "retain": "auto"} | TERMS[name]
    returns = ("grads", "outputs", "cotangents")
    result = box.result_of(
        Gradient(model="mlp", inputs=shards, loss=mean_square, returns=returns, **terms)
    )
    given = terms | {
        "penalties": [
            engine.Penalty(
                at=p.at, loss=p.loss, weight=p.weight, per_sample_scale=p.per_sample_scale
            )
            for p in terms.get("penalties", [])
        ]
    }
    group = Group("z", shards, order=given.pop("order", None))
    expected = engine.set_gradient(
        case_models.mlp(), [group], Objective(mean_square), returns=returns, **given
    )
    assert result.loss == pytest.approx(expected.loss, rel=TOLERANCE)
    assert list(result.names) == list(expected.grads)
    assert not expected.grads or difference(result.grads, expected.grads) <= TOLERANCE
    for found, right in (
        (result.outputs["z"], expected.outputs["z"]),
        (result.cotangents["z"], expected.cotangents["z"]),
        *(
            (result.input_grads[f"z/{index}/{argument}"], gradient)
            for argument, shards in (expected.input_grads or {}).get("z", {}).items()
            for index, gradient in enumerate(shards)
        ),
    ):
        torch.testing.assert_close(found, right, rtol=TOLERANCE, atol=TOLERANCE)
    manifest = result.manifest
    assert (manifest.seed, manifest.mode) == (terms["seed"], terms["mode"])
    assert manifest.shards_replayed == expected.replayed
    assert manifest.shards_retained == expected.retained
    assert manifest.recompute == terms.get("recompute", "auto")
    assert manifest.shards_recomputed == expected.recomputed.shards
    assert tuple(manifest.recomputed_blocks) == expected.recomputed.blocks


@pytest.mark.parametrize("precision", ["tf32", "bf16", "fp16", "fp64"])
def test_every_precision_is_stated_and_close(box: TestBox, precision: str) -> None:
    shards = [torch.randn(4, 3, generator=torch.Generator().manual_seed(i)) for i in range(3)]
    given = {"model": "tied", "inputs": shards, "loss": mean_square, "mode": "train"}
    exact = box.result_of(Gradient(**given))
    result = box.result_of(Gradient(**given, precision=precision))
    assert result.manifest.precision == precision
    assert result.loss == pytest.approx(exact.loss, rel=0.02)
    assert all(gradient.dtype in (torch.float32, DOUBLE) for gradient in result.grads.values())


def test_outputs_alone_are_those_of_a_gradient_and_have_no_loss(box: TestBox) -> None:
    case = CASES["cnn in train"]()
    shards, returns = case.groups["z"], ("outputs", "buffers")
    given = {"model": case.model.__name__, "inputs": shards, "mode": "train", "returns": returns}
    result = box.result_of(Forward(**given))
    expected = box.result_of(Gradient(**given, loss=mean_square))
    assert result.outputs["z"].dtype == DOUBLE
    assert torch.equal(result.outputs["z"], expected.outputs["z"])
    assert result.buffers.keys() == expected.buffers.keys()
    assert all(torch.equal(result.buffers[n], b) for n, b in expected.buffers.items())
    assert result.manifest.rows == {"z": [len(shard["0"]) for shard in shards]}
    assert result.manifest.computation == "forward"
    with pytest.raises(InvalidJob, match="forward"):
        _ = result.loss
    assert "loss" not in repr(result)


def test_gradients_of_inputs_without_a_floating_point_one_are_refused(box: TestBox) -> None:
    given = {"model": "transformer", "inputs": [torch.arange(8).reshape(2, 4)], "output": "hidden"}
    with pytest.raises(InvalidInputs, match="returns: expected a floating-point argument"):
        box.result_of(Gradient(**given, loss=mean_square, returns=("grads", "input_grads")))


def test_asking_for_input_gradients_needs_no_wrt(box: TestBox) -> None:
    shards = shards_of("mlp")
    result = box.result_of(
        Gradient(model="mlp", inputs=shards, loss=mean_square, returns=("input_grads",))
    )
    assert len(result.input_grads) == len(shards)
    assert not result.grads


def test_one_group_may_go_by_any_name(box: TestBox) -> None:
    shards = shards_of("mlp")
    named = box.result_of(Gradient(model="mlp", inputs={"texts": shards}, loss=mean_square))
    plain = box.result_of(Gradient(model="mlp", inputs=shards, loss=mean_square))
    assert named.loss == plain.loss


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"penalties": [Penalty(at="nowhere", loss=lambda tap: tap.sum())]}, "nowhere"),
        ({"order": torch.zeros(3, dtype=torch.int64)}, "order"),
        ({"order": {"elsewhere": torch.arange(3)}}, "elsewhere"),
        ({"wrt": ["inputs.nothing"]}, "inputs.nothing"),
    ],
)
def test_terms_that_do_not_fit_are_refused(
    box: TestBox, given: dict[str, object], says: str
) -> None:
    with pytest.raises(InvalidInputs, match=says):
        box.result_of(
            Gradient(model="mlp", inputs=shards_of("mlp"), loss=mean_square, **given),
        )


def test_a_penalty_with_parameters_of_its_own_is_refused(box: TestBox) -> None:
    class Learned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(2.0, dtype=DOUBLE))

        def forward(self, tap: Tensor) -> Tensor:
            return (self.scale * tap).sum()

    with pytest.raises(InvalidInputs, match="held constant"):
        box.result_of(
            Gradient(
                model="mlp",
                inputs=shards_of("mlp"),
                loss=mean_square,
                penalties=[Penalty(at="0", loss=Learned())],
            ),
        )


def test_an_untraceable_penalty_names_itself(box: TestBox) -> None:
    penalty = Penalty(at="0", loss=lambda tap: tap.sum().item())
    with pytest.raises(UntraceableLoss):
        box.result_of(
            Gradient(model="mlp", inputs=shards_of("mlp"), loss=mean_square, penalties=[penalty]),
        )


def test_gradients_of_inputs_through_a_model_without_parameters(box: TestBox) -> None:
    x = torch.linspace(-1, 1, 12, dtype=DOUBLE).reshape(4, 3)
    expected, leaf = (x.clone().requires_grad_() for _ in range(2))
    mean_square(zoo.without_parameters()(expected)).backward()
    given = {"model": "without_parameters", "inputs": list(x.split(2)), "loss": mean_square}
    result = box.result_of(Gradient(**given, returns=("grads", "input_grads")))
    found = torch.cat([result.input_grads[f"z/{shard}/0"] for shard in range(2)])
    torch.testing.assert_close(found, expected.grad)
    with box.client() as client:
        mean_square(client.model("without_parameters")(leaf)).backward()
    torch.testing.assert_close(leaf.grad, expected.grad)
