"""Embedding tables: padding, precisions, penalties, and losses that look up rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gradbox_engine import (
    Group,
    Objective,
    Penalty,
    set_gradient,
    shard_stream,
)
from tests.engine.replay.odd_models import Tables
from tests.engine.replay.odd_models import ids as _shards
from tests.oracle import TOLERANCE, difference


def _loss(z: Tensor) -> Tensor:
    z = F.normalize(z, dim=1)
    return (z @ z.T).exp().mean()


def _answer(model: nn.Module, **terms: Any) -> Any:
    told = {"mode": "train", "seed": 3} | terms
    return set_gradient(model, [Group("z", _shards())], Objective(_loss), **told)


def _naive(kind: Callable[[], nn.Module], dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    model = kind().to(dtype).train()
    zs = []
    for i, shard in enumerate(_shards()):
        with shard_stream(3, 0, i):
            zs.append(model(shard["0"]))
    _loss(torch.cat(zs)).backward()
    return {
        name: torch.zeros_like(p) if p.grad is None else p.grad.to_dense()
        for name, p in model.named_parameters()
    }


def test_padding_gets_no_gradient():
    gradient = _answer(Tables()).grads["words.weight"]
    assert not gradient[0].any()
    assert gradient[1:12].any(1).all()
    assert not gradient[12:].any()


@pytest.mark.parametrize(
    ("precision", "tolerance"), [("fp32", 2e-6), ("bf16", 3e-2), ("fp16", 4e-3), ("fp64", 1e-10)]
)
def test_in_every_precision(precision, tolerance):
    def model() -> nn.Module:
        return Tables().to(torch.float32)

    grads = _answer(model(), precision=precision).grads
    expected = _naive(lambda: model().double()) if precision == "fp64" else _naive(model)
    assert difference(grads, expected) <= tolerance


def test_weights_in_half_precision_have_wider_sums():
    grads = _answer(Tables().to(torch.bfloat16)).grads
    assert grads["words.weight"].dtype == torch.float32
    assert difference(grads, _naive(lambda: Tables().to(torch.bfloat16), torch.float32)) <= 5e-2


def test_penalties_reach_a_table():
    def loss(tap: Tensor) -> Tensor:
        return tap.square().sum()

    result = _answer(Tables(), penalties=[Penalty(at="words", loss=loss, weight=0.1)])
    expected = _naive(Tables)
    table = Tables().words
    sum(0.1 * loss(table(shard["0"])) for shard in _shards()).backward()
    expected["words.weight"] = expected["words.weight"] + table.weight.grad
    assert difference(result.grads, expected) <= TOLERANCE


def test_gradients_of_a_loss_that_looks_up_sparsely_are_dense():
    torch.manual_seed(0)
    shards = [{"0": torch.randn(2, 5, dtype=torch.float64)} for _ in range(3)]
    model = nn.Linear(5, 4, dtype=torch.float64)
    table = torch.randn(7, 4, dtype=torch.float64, requires_grad=True)
    rows = torch.tensor([4, 0, 4])

    def loss(z: Tensor, table: Tensor) -> Tensor:
        looked_up = z[rows] * F.embedding(rows, table, sparse=True)
        return looked_up.sin().sum()

    loss(torch.cat([model(shard["0"]) for shard in shards]), table).backward()
    naive = {"table": table.grad, **{name: p.grad for name, p in model.named_parameters()}}
    expected = {name: g.to_dense() for name, g in naive.items() if g is not None}
    objective = Objective(loss, {"table": table}, {"table": table})
    found = set_gradient(model, [Group("z", shards)], objective)
    assert {g.layout for g in found.grads.values()} == {torch.strided}
    assert difference(found.grads, expected) <= TOLERANCE
