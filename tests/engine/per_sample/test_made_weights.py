"""Weights that a model makes of its parameters in every call: rows without a loop over samples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradbox_engine.errors import CoupledSamples
from gradbox_engine.per_sample import jacobian, per_sample_gradient
from tests.device import DEVICE, moved
from tests.engine.per_sample import naive


class _Rounded(torch.autograd.Function):
    """Rounds, and passes gradients straight through where nothing is clipped."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(weight)
        return (weight * 4).round().clamp(-3, 3) / 4

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Tensor:  # type: ignore[override]
        (weight,) = ctx.saved_tensors
        return cotangent * (weight.abs() <= 0.75)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(a, b)
        return a @ b

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        a, b = ctx.saved_tensors
        # By NumPy, which takes no batches.
        return torch.from_numpy((cotangent @ b.T).cpu().numpy()).to(a), a.T @ cotangent


class _Made(nn.Module):
    """A linear layer whose weight `make` makes of what the layer has, for x."""

    def __init__(self, make: Callable[[_Made, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.make = make
        self.weight, self.entries = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(6))
        self.out = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        z: Tensor = self.out(F.linear(x, self.make(self, x)).tanh())
        return z


def _filled(layer: _Made, x: Tensor) -> Tensor:
    rows, columns = torch.triu_indices(4, 4, 1, device=x.device)
    matrix = torch.zeros(4, 4, dtype=x.dtype, device=x.device)
    matrix[rows, columns] = layer.entries
    upper = matrix * 2.0
    matrix[columns, rows] = -layer.entries
    return layer.weight + upper.T + matrix.matrix_exp()


def _sparse(layer: _Made, x: Tensor) -> Tensor:
    places = torch.tensor([[0, 0, 1, 2, 3, 3], [1, 3, 2, 0, 0, 3]], device=x.device)
    return layer.weight + torch.sparse_coo_tensor(places, layer.entries, (4, 4))


WEIGHTS: dict[str, Callable[[_Made, Tensor], Tensor]] = {
    "rounded": lambda layer, x: _Rounded.apply(layer.weight * layer.entries[0]),  # type: ignore[no-untyped-call]
    "by NumPy": lambda layer, x: _Product.apply(layer.weight, layer.weight * layer.entries[0]),  # type: ignore[no-untyped-call]
    "filled": _filled,
    "sparse": _sparse,
    "to that of x": lambda layer, x: layer.weight.to(x) * layer.entries.sum().to(x),
    "of the type of x": lambda layer, x: layer.weight.type_as(x) * layer.entries.sum().type_as(x),
}


@pytest.mark.parametrize("name", WEIGHTS)
def test_rows_are_pulled_back_through_what_makes_a_weight(name: str) -> None:
    model = _Made(WEIGHTS[name]).double().to(DEVICE)
    shard = moved({"0": torch.randn(5, 4, dtype=torch.float64)})
    expected = naive.flat(naive.jacobian(model, shard))
    for _ in range(2):
        result = jacobian(model, [shard])
        assert naive.difference(naive.flat(result.arrays), expected) <= naive.TOLERANCE
        assert not result.loops
        assert "derived" in result.roads["entries"]


def test_torch_has_its_own_apply_again_after_a_job() -> None:
    before = vars(torch.autograd.Function)["apply"]
    model = _Made(WEIGHTS["rounded"]).to(DEVICE)
    per_sample_gradient(model, [moved({"0": torch.randn(5, 4)})], lambda z: z.sum(1))
    assert vars(torch.autograd.Function)["apply"] is before


class _Neighbours(nn.Module):
    """A graph's layer: nodes are rows, and their neighbours as the data say."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 2)

    def forward(self, x: Tensor, to: Tensor) -> Tensor:
        n = len(x)
        places = torch.stack([torch.arange(n, device=x.device), to % n])
        adjacency = torch.sparse_coo_tensor(places, x.new_ones(n), (n, n))
        z: Tensor = torch.sparse.mm(adjacency, self.linear(x))
        return z


def test_samples_that_a_sparse_matrix_mixes_are_refused() -> None:
    shard = moved({"x": torch.randn(5, 4), "to": torch.tensor([1, 2, 3, 4, 0])})
    with pytest.raises(CoupledSamples):
        jacobian(_Neighbours().to(DEVICE), [shard])
