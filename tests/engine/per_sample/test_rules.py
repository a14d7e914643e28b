"""Every way of using a parameter against one backward pass a sample."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from gradbox_engine.per_sample import jacobian, per_sample_gradient
from tests.engine.per_sample import naive
from tests.engine.per_sample.zoo import CASES, LOOPS, build


@pytest.mark.parametrize("name", CASES)
def test_jacobian_is_that_of_one_backward_a_sample(name: str) -> None:
    model, inputs = build(name)
    expected = naive.jacobian(model, inputs)
    result = jacobian(model, [inputs])
    for parameter, array in expected.items():
        apart = naive.difference(result.arrays[parameter], array)
        assert apart <= naive.TOLERANCE or not array.any(), parameter
    assert naive.difference(naive.flat(result.arrays), naive.flat(expected)) <= naive.TOLERANCE
    assert set(result.loops) == LOOPS.get(name, set())


@pytest.mark.parametrize("name", ["convolution, 2d", "lstm", "embedding twice and tied"])
def test_gradient_of_a_loss_with_inputs(name: str) -> None:
    model, inputs = build(name)
    z = naive.outputs(model, inputs)
    targets = torch.randn_like(z)
    losses = (z - targets).square().sum(1, keepdim=True)
    expected = naive.rows(losses, dict(model.named_parameters()))
    result = per_sample_gradient(
        model,
        [inputs],
        lambda z, targets: (z.flatten(1) - targets).square().sum(1),
        loss_inputs={"targets": targets},
    )
    found = naive.flat(result.arrays, lead=1)
    assert naive.difference(found, naive.flat(expected)[:, 0]) <= naive.TOLERANCE


def test_shards_are_rows_of_one_result() -> None:
    model, inputs = build("convolution, 2d")
    targets = torch.arange(5.0, dtype=torch.float64)
    shards = [{"0": inputs["0"][:3]}, {"0": inputs["0"][3:]}]

    def loss(z: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return z.square().sum(1) * targets

    whole = per_sample_gradient(model, [inputs], loss, loss_inputs={"targets": targets})
    cut = per_sample_gradient(model, shards, loss, loss_inputs={"targets": targets})
    found, expected = naive.flat(cut.arrays, lead=1), naive.flat(whole.arrays, lead=1)
    assert naive.difference(found, expected) <= naive.TOLERANCE


class _Moved(TorchFunctionMode):
    """Counts the rows of each tensor of whole numbers that is told its device."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[int] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.to and args[0].dtype == torch.int64:
            self.rows.append(len(args[0]))
        return func(*args, **kwargs or {})


def test_of_a_loss_input_the_shard_s_own_rows_alone_go_to_the_device() -> None:
    model, x = nn.Linear(3, 2), torch.randn(6, 3)
    shards, classes = [{"0": part} for part in x.split(2)], torch.zeros(6, dtype=torch.int64)
    with _Moved() as moved:
        per_sample_gradient(
            model, shards, lambda z, classes: z.sum(1) + classes, loss_inputs={"classes": classes}
        )
    assert max(moved.rows) == 2  # a check takes one of them alone


def test_a_wrong_row_is_told_from_a_right_one() -> None:
    model, inputs = build("convolution, 2d")
    expected = naive.flat(naive.jacobian(model, inputs))
    assert naive.difference(expected * 1.001, expected) > naive.TOLERANCE
    assert naive.difference(expected.flip(0), expected) > naive.TOLERANCE


def test_only_wanted_parameters_are_answered() -> None:
    model, inputs = build("encoder layer")
    model.get_parameter("a.linear1.weight").requires_grad_(False)
    expected = naive.jacobian(build("encoder layer")[0], inputs)
    result = jacobian(model, [inputs], wrt=["a.linear1.*"])
    assert list(result.arrays) == ["a.linear1.weight", "a.linear1.bias"]
    for name, array in result.arrays.items():
        assert naive.difference(array, expected[name]) <= naive.TOLERANCE
    assert not model.get_parameter("a.linear1.weight").requires_grad
    assert model.get_parameter("a.norm1.weight").requires_grad


def test_an_unused_layer_is_named_and_zero() -> None:
    model, inputs = build("unused layer")
    result = jacobian(model, [inputs])
    assert result.unreached == ("b.weight", "b.bias")
    assert not result.arrays["b.weight"].any()


def test_a_layer_used_on_another_way_is_planned_anew() -> None:
    model, inputs = build("branch on the data")
    expected = naive.jacobian(model, inputs)
    other = {"0": inputs["0"], "1": ~inputs["1"]}
    expected_other = naive.jacobian(model, other)
    assert naive.difference(naive.flat(jacobian(model, [inputs]).arrays), naive.flat(expected)) == 0
    found = naive.flat(jacobian(model, [other]).arrays)
    assert naive.difference(found, naive.flat(expected_other)) <= naive.TOLERANCE


@pytest.mark.parametrize("name", ["lstm", "encoder layer", "checkpointing"])
def test_dropout_masks_are_those_of_the_batched_pass(name: str) -> None:
    model, inputs = build(name)
    for module in model.modules():
        if hasattr(module, "dropout") and isinstance(module.dropout, float):
            module.dropout = 0.5
        if isinstance(module, nn.Dropout):
            module.p = 0.5
    dropped = nn.Sequential(nn.Dropout(0.3), model)
    expected = naive.jacobian(dropped.train(), inputs, seed=3)
    result = jacobian(dropped, [inputs], mode="train", seed=3)
    assert naive.difference(naive.flat(result.arrays), naive.flat(expected)) <= naive.TOLERANCE
    other = jacobian(dropped, [inputs], mode="train", seed=4)
    assert naive.difference(naive.flat(other.arrays), naive.flat(expected)) > 1e-3
