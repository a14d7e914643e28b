"""A check that raises is made on the box: `assert`, `if ...: raise`, and what a tensor is asked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from gradbox.errors import UntraceableLoss
from gradbox.tracing.trace import trace
from gradbox_worker.interpreting.build import build
from tests.graphs.checks import CHECKS, NO_CHECKS, not_all_positive

MATRIX = torch.rand(4, 3, dtype=torch.float64) + 0.1
CUBE = MATRIX[None]


def rebuilt(function: Callable[..., Any]) -> Callable[..., Any]:
    traced = trace(function, positional=1)
    return build(traced.graph, traced.tensors, device="cpu")


@pytest.mark.parametrize("function", CHECKS, ids=lambda function: function.__name__)
def test_a_check_that_holds_changes_nothing(function: Callable[[Tensor], Tensor]) -> None:
    assert rebuilt(function)(MATRIX) == function(MATRIX)


@pytest.mark.parametrize("function", CHECKS, ids=lambda function: function.__name__)
def test_a_check_that_does_not_hold_ends_the_call(function: Callable[[Tensor], Tensor]) -> None:
    wrong = -MATRIX if function is not_all_positive else CUBE
    with pytest.raises((ValueError, TypeError, AssertionError)):
        function(wrong)
    with pytest.raises(
        AssertionError, match=r"a check of the loss does not hold \(checks\.py:\d+: (if|assert) "
    ):
        rebuilt(function)(wrong)


@pytest.mark.parametrize("function", NO_CHECKS, ids=lambda function: function.__name__)
def test_what_is_no_such_check_is_refused(function: Callable[[Tensor], Any]) -> None:
    with pytest.raises(UntraceableLoss):
        trace(function, positional=1)
