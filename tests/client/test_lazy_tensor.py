"""A lazy tensor answers Python's operators as the tensor that it stands for."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch

from gradbox.tensors.lazy_tensor import LazyTensor

WHOLE = torch.tensor([[3, 1, 2], [5, 0, 7]])
BINARY = (
    *(operator.add, operator.sub, operator.mul, operator.truediv, operator.floordiv, operator.mod),
    *(operator.pow, operator.and_, operator.or_, operator.xor, operator.lt, operator.ge),
    *(operator.eq, operator.ne),
)


def lazy(whole: torch.Tensor = WHOLE) -> Any:
    return LazyTensor(tuple(whole.shape), lambda region: whole[region], dtype=lambda: whole.dtype)


@pytest.mark.parametrize("of", BINARY)
def test_an_operator_of_two(of: Callable[[Any, Any], Any]) -> None:
    other = WHOLE + 1
    assert torch.equal(of(lazy(), 2), of(WHOLE, 2))
    assert torch.equal(of(2, lazy(other)), of(2, other))
    assert torch.equal(of(lazy(), other), of(WHOLE, other))
    assert torch.equal(of(other, lazy(other)), of(other, other))
    assert torch.equal(of(lazy(), lazy(other)), of(WHOLE, other))


@pytest.mark.parametrize("of", [operator.neg, operator.pos, operator.invert, abs])
def test_an_operator_of_one(of: Callable[[Any], Any]) -> None:
    assert torch.equal(of(lazy()), of(WHOLE))


def test_a_number_is_in_it_where_an_entry_is() -> None:
    assert 7 in lazy()
    assert 4 not in lazy()
