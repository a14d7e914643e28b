"""A function that goes another way for a symbol than for a tensor is refused, not frozen."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gradbox.errors import UntraceableLoss
from gradbox.tracing.trace import trace
from gradbox_worker.interpreting.build import build


def number(z: Tensor) -> Tensor:
    scale = 1.0
    with contextlib.suppress(Exception):
        scale = float(z.max())
    return z.sum() * scale


def whole_number(z: Tensor) -> Tensor:
    try:
        half = int(z.shape[0] / 2)
    except TypeError:
        half = 1
    return z[:half].sum()


def item(z: Tensor) -> Tensor:
    scale = 1.0
    with contextlib.suppress(Exception):
        scale = z.max().item()
    return z.sum() * scale


def length(z: Tensor) -> Tensor:
    with contextlib.suppress(Exception):
        return z.sum() / z.__len__()
    return z.sum()


def branch(z: Tensor) -> Tensor:
    with contextlib.suppress(Exception):
        return z.sum() if z.mean() > 0 else -z.sum()
    return z.mean()


def may_be_called(z: Tensor) -> Tensor:
    return z().sum() if callable(z) else z.sum()  # type: ignore[operator]


def class_of_a_tensor(z: Tensor) -> Tensor:
    return z.sum() if z.__class__ is torch.Tensor else z.mean()


@functools.singledispatch
def by_type(z: Any) -> Any:
    return z.mean()


@by_type.register
def _(z: Tensor) -> Tensor:
    return z.sum()


def copied(z: Tensor) -> Tensor:
    return copy.copy(z).mul_(2).sum()


WAYS = [
    number,
    whole_number,
    item,
    length,
    branch,
    may_be_called,
    class_of_a_tensor,
    by_type,
    copied,
]


@pytest.mark.parametrize("function", WAYS, ids=lambda function: function.__name__)
def test_another_way_for_a_symbol_is_refused(function: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(UntraceableLoss):
        trace(function, positional=1)


def test_an_attribute_that_no_tensor_has_is_not_there() -> None:
    def loss(z: Tensor) -> Tensor:
        hidden = z.hidden if hasattr(z, "hidden") else z
        scale = 2.0 if getattr(z, "scale", None) is None else 3.0
        return (hidden * scale * hasattr(z, "mean")).sum()

    traced = trace(loss, positional=1)
    z = torch.arange(3.0)
    assert build(traced.graph, {}, device="cpu")(z) == loss(z)


class LastMean:
    def __init__(self) -> None:
        self.last = torch.zeros(3)

    def __call__(self, z: Tensor) -> Tensor:
        mean = z.mean(0).detach()
        value = (z - self.last).square().sum()
        self.last = mean
        return value


def test_what_an_earlier_trace_left_is_not_read_as_a_value_of_this_one() -> None:
    loss = LastMean()
    trace(loss, positional=1)
    with pytest.raises(
        UntraceableLoss, match=r"self\.last.*earlier trace.*buffer of an nn\.Module"
    ):
        trace(loss, positional=1)


def test_a_written_buffer_is_not_read_into_another_dtype() -> None:
    mean = torch.zeros(3)

    def loss(z: Tensor) -> Tensor:
        mean.add_(z.detach().mean(0))
        return (z * torch.tensor(mean, dtype=z.dtype)).sum()

    with pytest.raises(UntraceableLoss, match="was written to"):
        trace(loss, positional=1)


@pytest.mark.parametrize(
    "register", ["register_full_backward_hook", "register_full_backward_pre_hook"]
)
def test_a_module_that_changes_gradients_on_their_way_back_is_refused(register: str) -> None:
    layer = nn.Linear(3, 3).requires_grad_(False)

    def loss(z: Tensor) -> Tensor:
        found: Tensor = layer(z).sum()
        return found

    trace(loss, positional=1)
    getattr(layer, register)(lambda module, *gradients: None)
    with pytest.raises(UntraceableLoss, match="Linear has a backward hook"):
        trace(loss, positional=1)


def test_a_parameter_that_changes_its_gradient_is_refused() -> None:
    layer = nn.Linear(3, 1)
    trace(layer, positional=1)
    layer.bias.register_hook(lambda gradient: 2 * gradient)
    with pytest.raises(UntraceableLoss, match="parameter bias has a hook"):
        trace(layer, positional=1)
