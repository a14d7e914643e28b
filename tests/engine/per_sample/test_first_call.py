"""The first call on a model: the passes that it takes, and what its plan is made from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gradbox_engine import Group
from gradbox_engine.per_sample import jacobian, per_sample_gradient
from gradbox_engine.per_sample.planning.model import callable_model
from gradbox_engine.per_sample.recording.batch_axis import BatchAxis, find
from tests.engine.per_sample import naive
from tests.engine.per_sample.zoo import Written

B, T = 6, 3
First = Callable[[Any, Tensor], Tensor]
PROBES = [3, 4, 4]
ALONE = 1


def _samples_outside(m: Any, x: Tensor) -> Tensor:
    hidden: Tensor = m.a(x.reshape(-1, 5)).view(len(x), T, 4)
    return hidden


def _samples_inside(m: Any, x: Tensor) -> Tensor:
    hidden: Tensor = m.a(x.transpose(0, 1).reshape(-1, 5)).view(T, len(x), 4).transpose(0, 1)
    return hidden


class Counted:
    """Two layers, the first of which sees samples and positions in one dim, and their passes."""

    def __init__(self, first: First) -> None:
        self.forwards: list[int] = []  # samples of each pass
        self.backwards: list[int] = []

        def forward(m: Any, x: Tensor) -> Tensor:
            self.forwards.append(len(x))
            hidden = first(m, x)
            if hidden.requires_grad:
                hidden.register_hook(lambda g: self.backwards.append(len(g)))
            z: Tensor = m.b(hidden.tanh().sum(1)).sin()
            return z

        torch.manual_seed(1)
        self.model = Written(forward, a=nn.Linear(5, 4), b=nn.Linear(4, 2)).double()


def _shard() -> dict[str, Tensor]:
    return {"0": torch.randn(B, T, 5, generator=torch.Generator().manual_seed(0)).double()}


def _expected(model: nn.Module, head: Callable[[Tensor], Tensor]) -> Tensor:
    values = head(naive.outputs(model, _shard()))
    return naive.flat(naive.rows(values, dict(model.named_parameters())))


@pytest.mark.parametrize("first", [_samples_outside, _samples_inside])
def test_a_first_call_takes_three_probes_one_sample_one_forward_and_two_backward_passes(
    first: First,
) -> None:
    counted = Counted(first)
    found = per_sample_gradient(counted.model, [_shard()], lambda z: z.square().sum(1))
    assert (counted.forwards, counted.backwards) == ([*PROBES, B, ALONE], [B, B])
    expected = _expected(counted.model, lambda z: z.square().sum(1)[:, None])[:, 0]
    assert naive.difference(naive.flat(found.arrays, lead=1), expected) <= naive.TOLERANCE
    assert not found.loops


@pytest.mark.parametrize("first", [_samples_outside, _samples_inside])
def test_a_first_jacobian_takes_three_probes_one_sample_and_one_forward_pass(
    first: First,
) -> None:
    counted = Counted(first)
    found = jacobian(counted.model, [_shard()])
    assert counted.forwards == [*PROBES, B, ALONE]
    expected = _expected(counted.model, lambda z: z)
    assert naive.difference(naive.flat(found.arrays), expected) <= naive.TOLERANCE
    assert not found.loops


@pytest.mark.parametrize("axis", [BatchAxis(1, 3, 1), BatchAxis(1, 1, 3), BatchAxis(1, 2, 3)])
def test_the_order_of_a_merged_dim_is_told_by_the_replaced_sample(axis: BatchAxis) -> None:
    first, second = (torch.randn(2, axis.length(samples), 5) for samples in (3, 4))
    third = second.clone()
    axis.lead(third)[1] += 1
    assert find(first, second, third, 3) == axis


def test_samples_that_all_differ_have_no_order_in_a_merged_dim() -> None:
    first, second, third = torch.randn(9, 5), torch.randn(12, 5), torch.randn(12, 5)
    assert find(first, second, third, 3) is None


def _tensors() -> Mapping[str, Tensor]:
    last_row_zero, first_row_zero = torch.ones(3, 2), torch.ones(3, 2)
    last_row_zero[-1], first_row_zero[0] = 0, 0
    return {
        "scalar": torch.tensor(0.0),
        "vector": torch.zeros(3),
        "matrix": torch.zeros(3, 2),
        "empty": torch.zeros(0, 2),
        "last_row_zero": last_row_zero,
        "first_row_zero": first_row_zero,
        "not_a_number": torch.tensor([float("nan"), 0.0]),
    }


def test_a_tensor_with_one_number_that_is_not_zero_is_not_all_zero() -> None:
    module = nn.Linear(2, 2)
    for name, tensor in _tensors().items():
        module.register_buffer(name, tensor)
    with callable_model(module, [Group("z", [{}])]) as model:
        assert model.zeros() == {"scalar", "vector", "matrix", "empty"}
