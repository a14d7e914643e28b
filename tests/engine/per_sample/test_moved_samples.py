"""Layers between two moves of the samples, which data have do nothing on the first shard."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

from gradbox_engine.per_sample import jacobian
from tests.device import DEVICE
from tests.engine.per_sample import naive
from tests.engine.per_sample.zoo import Written

B = 5


class Permuted(Function):
    @staticmethod
    def forward(ctx: Any, h: Tensor, order: Tensor) -> Tensor:
        ctx.save_for_backward(order)
        return h[order].clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return g[ctx.saved_tensors[0].argsort()], None


def _sliced(h: Tensor, k: int) -> Tensor:
    return torch.cat([h[len(h) - k :], h[: len(h) - k]])


def _narrowed(h: Tensor, k: int) -> Tensor:
    rest = len(h) - k
    return torch.cat([h.narrow(0, rest, k), h.narrow(0, 0, rest)])


def _split(h: Tensor, k: int) -> Tensor:
    front, back = h.split([len(h) - k, k])
    return torch.cat([back, front])


def _order(h: Tensor, k: int) -> Tensor:
    return (torch.arange(len(h), device=h.device) + (len(h) - k)) % len(h)


def _sparse(h: Tensor, k: int) -> Tensor:
    matrix = torch.eye(len(h), dtype=h.dtype, device=h.device)[_order(h, k)]
    return torch.sparse.mm(matrix.to_sparse(), h.flatten(1)).clone().view_as(h)


MOVES: dict[str, Callable[[Tensor, int], Tensor]] = {
    "roll": lambda h, k: h.roll(k, 0),
    "roll of all numbers": lambda h, k: h.flatten().roll(k * h[0].numel()).view_as(h),
    "slices": _sliced,
    "narrow": _narrowed,
    "split": _split,
    "a table of activations": lambda h, k: F.embedding(_order(h, k), h.flatten(1)).view_as(h),
    "a sparse matrix": _sparse,
    "a custom Function": lambda h, k: Permuted.apply(h, _order(h, k)),  # type: ignore[no-any-return]
}


@pytest.mark.parametrize("name", MOVES)
def test_samples_that_a_later_shard_moves(name: str) -> None:
    move = MOVES[name]

    def forward(m: Any, x: Tensor) -> Tensor:
        k = int(x[:, 0, 0].min().item() > 0)
        h = m.mid(move(m.first(x).tanh(), k)).tanh()
        return m.last(move(h, (len(x) - k) % len(x)).flatten(1))  # type: ignore[no-any-return]

    torch.manual_seed(0)
    model = Written(forward, first=nn.Linear(3, 4), mid=nn.Linear(4, 4), last=nn.Linear(8, 2))
    model = model.double().to(DEVICE)
    shards = [torch.randn(B, 2, 3, dtype=torch.float64).to(DEVICE) for _ in range(2)]
    shards[0][:, 0, 0], shards[1][:, 0, 0] = torch.arange(B) - 1.0, torch.arange(B) + 1.0
    inputs = [{"0": x} for x in shards]
    found = naive.flat(jacobian(model, inputs, seed=1).arrays)
    expected = torch.cat([naive.flat(naive.jacobian(model, shard)) for shard in inputs])
    assert naive.difference(found, expected) <= naive.TOLERANCE


@pytest.mark.parametrize("time_first", [True, False])
def test_ids_that_are_all_equal_do_not_settle_an_order(time_first: bool) -> None:
    def forward(m: Any, ids: Tensor) -> Tensor:
        ids = ids.t() if time_first else ids
        h = m.mid(m.table(ids.reshape(-1)).tanh()).view(*ids.shape, -1)
        return m.last(h.tanh().sum(0 if time_first else 1))  # type: ignore[no-any-return]

    torch.manual_seed(0)
    model = Written(forward, table=nn.Embedding(7, 4), mid=nn.Linear(4, 4), last=nn.Linear(4, 2))
    model = model.double().to(DEVICE)
    ids = [torch.zeros(B, 3, dtype=torch.long), torch.randint(7, (B, 3))]
    shards = [{"0": x.to(DEVICE)} for x in ids]
    result = jacobian(model, shards)
    expected = torch.cat([naive.flat(naive.jacobian(model, shard)) for shard in shards])
    assert naive.difference(naive.flat(result.arrays), expected) <= naive.TOLERANCE
    assert not result.loops
