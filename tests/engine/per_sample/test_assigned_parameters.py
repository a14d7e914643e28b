"""Parameters that are written into a matrix: triangular and banded weights, as flows have them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradbox_engine.per_sample import jacobian
from tests.device import DEVICE, moved
from tests.engine.per_sample import naive
from tests.engine.per_sample.zoo import Written


def _p(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape) * 0.5)


def _lower(m: Any, x: Tensor) -> Tensor:
    """L U, with entries at indices and a diagonal of ones."""
    rows, columns = torch.tril_indices(4, 4, -1, device=x.device)
    lower, upper = x.new_zeros(4, 4), x.new_zeros(4, 4)
    lower[rows, columns] = m.p
    lower[range(4), range(4)] = 1.0
    upper[columns, rows] = m.q.exp()
    upper[range(4), range(4)] = F.softplus(m.d)
    return F.linear(F.linear(x, upper), lower).tanh()


def _sliced(m: Any, x: Tensor) -> Tensor:
    weight = x.new_zeros(4, 4)
    weight[1:, 0] = m.d[:3]
    weight[2] = m.d
    return x @ weight + weight[2]


def _read_between(m: Any, x: Tensor) -> Tensor:
    """The matrix is used, and then written to again."""
    weight = x.new_zeros(4, 4)
    weight[0] = m.d
    h = (x * weight[0].clone()).tanh()
    weight[1] = m.p[:4]
    return h @ weight


def _written_over(m: Any, x: Tensor) -> Tensor:
    """What a layer has used is written over, of which autograd needs nothing."""
    weight = x.new_zeros(4, 4)
    weight[0] = m.d
    h = F.linear(x, weight)
    weight[0] = m.p[:4]
    return F.linear(h.tanh(), weight)


CASES: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "indices": _lower, "slices": _sliced, "twice": _read_between, "over": _written_over,
}  # fmt: skip


def _of_the_batch(m: Any, x: Tensor) -> Tensor:
    """An activation is written into a matrix of parameters."""
    weight = m.w * 1
    h = x.new_zeros(len(x), 4)
    h[:, 1:] = (x @ weight)[:, 1:]
    h[:, 0] = m.d[0]
    return h.tanh()


@pytest.mark.parametrize("name", CASES)
def test_rows_are_exact_without_a_loop(name: str) -> None:
    model, inputs = _model(CASES[name])
    expected = naive.jacobian(model, inputs)
    for _ in range(2):
        result = jacobian(model, [inputs])
        assert naive.difference(naive.flat(result.arrays), naive.flat(expected)) <= naive.TOLERANCE
        assert not result.loops


def test_rows_are_exact_where_the_batch_is_written_as_well() -> None:
    model, inputs = _model(_of_the_batch)
    result = jacobian(model, [inputs])
    expected = naive.flat(naive.jacobian(model, inputs))
    assert naive.difference(naive.flat(result.arrays), expected) <= naive.TOLERANCE


def _model(forward: Callable[[Any, Tensor], Tensor]) -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    model = Written(forward, p=_p(6), q=_p(6), d=_p(4), w=_p(4, 4)).double().to(DEVICE)
    return model, moved({"0": torch.randn(5, 4, dtype=torch.float64)})
