"""Gradients with respect to the model's arguments."""

from __future__ import annotations

import pytest
import torch

from gradbox_engine import Group, Objective, UnknownParameter, set_gradient
from tests.cases import CASES
from tests.engine.replay.running import answer
from tests.oracle import TOLERANCE, difference, naive


def _found(result, group: str) -> dict[tuple[str, int, str], torch.Tensor]:
    return {
        (group, index, name): gradient
        for name, shards in result.input_grads[group].items()
        for index, gradient in enumerate(shards)
    }


@pytest.mark.parametrize("retain", [0, 10**9])
@pytest.mark.parametrize("name", ["mlp", "cnn in train", "lstm", "average saved"])
def test_gradients_of_inputs_are_those_of_naive_code(name, retain):
    expected = naive(CASES[name]())
    result = answer(CASES[name](), wrt=["*", "inputs.0"], retain=retain)
    assert difference(_found(result, "z"), expected.input_grads) <= TOLERANCE
    assert difference(result.grads, expected.grads) <= TOLERANCE


def test_inputs_of_one_tower():
    result = answer(CASES["two towers"](), wrt=["inputs.texts.*"])
    assert result.input_grads.keys() == {"texts"}
    assert set(result.grads) == {"loss.log_scale"}
    expected = naive(CASES["two towers"]()).input_grads
    texts = {place: gradient for place, gradient in expected.items() if place[0] == "texts"}
    assert difference(_found(result, "texts"), texts) <= TOLERANCE


def test_inputs_that_the_loss_does_not_reach_are_zeros_and_named():
    case = CASES["two towers"]()
    groups = [
        Group(name, shards, method=case.methods[name]) for name, shards in case.groups.items()
    ]
    objective = Objective(lambda images, texts: texts[:5].square().mean())
    result = set_gradient(case.model(), groups, objective, wrt=["inputs.*"])
    assert result.unreached == ("inputs.images.pixels",)
    assert [bool(g.any()) for g in result.input_grads["images"]["pixels"]] == [False] * 3
    assert [bool(g.any()) for g in result.input_grads["texts"]["features"]] == [True, False]


def test_an_integer_argument_has_no_gradient():
    with pytest.raises(UnknownParameter, match=r"expected 'inputs.tokens' to match"):
        answer(CASES["transformer"](), wrt=["inputs.tokens"])


def test_gradients_of_inputs_through_a_model_without_parameters():
    x = torch.linspace(-1, 1, 12, dtype=torch.float64).reshape(4, 3)
    groups = [Group("z", [{"0": x[:2]}, {"0": x[2:]}])]
    objective = Objective(lambda z: z.square().sum())
    result = set_gradient(torch.nn.Tanh(), groups, objective, wrt=["*", "inputs.*"])
    leaf = x.clone().requires_grad_()
    leaf.tanh().square().sum().backward()
    assert result.grads == {}
    torch.testing.assert_close(torch.cat(result.input_grads["z"]["0"]), leaf.grad)


def test_the_scale_of_fp16_does_not_show():
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4)
    shards = [{"0": torch.randn(3, 4)} for _ in range(2)]

    def gradient(precision: str) -> dict[int, torch.Tensor]:
        result = set_gradient(
            model,
            [Group("z", shards)],
            Objective(lambda z: z.square().sum() * 1e-6),
            wrt=["inputs.0"],
            precision=precision,
        )
        return dict(enumerate(result.input_grads["z"]["0"]))

    assert difference(gradient("fp16"), gradient("fp32")) < 1e-2
