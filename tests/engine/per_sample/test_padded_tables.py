"""Tables whose padding row has no gradient, which torch's batching rule of a look-up forgets."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gradbox_engine.per_sample import jacobian, per_sample_gradient
from tests.engine.per_sample import naive
from tests.engine.per_sample.zoo import Written

IDS = {"padding first": (0, 1, 2, 0, 3), "padding last": (1, 2, 3, 2, 0), "padding twice": (0, 0)}


def _of_module() -> nn.Module:
    table = nn.Embedding(4, 3, padding_idx=0, max_norm=0.5)
    return Written(lambda m, ids: m.e(ids).sin(), e=table).double()


def _of_function() -> nn.Module:
    table = nn.Parameter(torch.randn(4, 3, dtype=torch.float64))
    return Written(lambda m, ids: torch.embedding(m.w, ids, 0).sin(), w=table)


@pytest.mark.parametrize("ids", IDS)
@pytest.mark.parametrize("make", [_of_module, _of_function])
def test_the_padding_row_has_no_gradient(make: Any, ids: str) -> None:
    torch.manual_seed(0)
    model, inputs = make(), {"0": torch.tensor(IDS[ids])}
    expected = naive.jacobian(model, inputs)
    found = jacobian(model, [inputs])
    assert naive.difference(naive.flat(found.arrays), naive.flat(expected)) <= naive.TOLERANCE

    def loss(z: Tensor) -> Tensor:
        return z.sum(1)

    of_loss = naive.flat({name: rows.sum(1) for name, rows in expected.items()}, lead=1)
    rows = per_sample_gradient(model, [inputs], loss)
    assert naive.difference(naive.flat(rows.arrays, lead=1), of_loss) <= naive.TOLERANCE
