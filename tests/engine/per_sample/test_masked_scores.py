"""Layers behind a mask: inputs at the end of their dtype, where the output gradient is zero."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gradbox_engine.per_sample import jacobian
from gradbox_factors import Factored, Outer, Term
from tests.engine.per_sample import naive


class _Masked(nn.Module):
    """Scores that a mask has filled with the least number pass a layer, and then a softmax."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.query = nn.Linear(4, 8)
        self.mix = nn.Conv2d(2, 2, 1) if kind == "convolution" else nn.Linear(2, 2)
        self.last = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.query(x).unflatten(-1, (2, 4)).transpose(1, 2)
        hidden = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
        scores = (h @ h.mT).masked_fill(hidden, torch.finfo(x.dtype).min)
        if isinstance(self.mix, nn.Conv2d):
            scores = self.mix(scores)
        else:
            scores = self.mix(scores.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        h = scores.masked_fill(hidden, -torch.inf).softmax(-1) @ h
        z: Tensor = self.last(h.transpose(1, 2).flatten(2)).mean(1)
        return z


@pytest.mark.parametrize("kind", ["convolution", "linear"])
def test_products_with_directions_are_finite(kind: str) -> None:
    torch.manual_seed(0)
    model = _Masked(kind).double()
    shard = {"0": torch.randn(3, 6, 4, dtype=torch.float64)}
    tangents = {n: 2 + torch.rand_like(p) for n, p in model.named_parameters()}
    rows = naive.jacobian(model, shard)
    expected = torch.stack([rows[n].flatten(2) @ v.flatten() for n, v in tangents.items()]).sum(0)
    found = jacobian(model, [shard], reduce="jvp", vectors=tangents).arrays["jvp"]
    assert naive.difference(found, expected) <= naive.TOLERANCE


def _wide(dtype: torch.dtype) -> Factored:
    """Rows of a layer of which products over pairs of positions are cheaper; one is masked."""
    generator = torch.Generator().manual_seed(0)
    left = torch.randn(2, 3, 4, 40, dtype=dtype, generator=generator)
    right = torch.randn(3, 4, 40, dtype=dtype, generator=generator)
    left[:, :, 2], right[:, 2] = 0, torch.finfo(dtype).min
    term: Term = Outer("w", (40, 40), left, right)
    return Factored([{"w": term}])


REDUCTIONS: dict[str, Any] = {
    "norms": lambda factors: factors.norms(),
    "gram": lambda factors: factors.gram(),
    "gram with others": lambda factors: factors.gram_with(_wide(torch.float64)),
    "projection": lambda factors: factors.projection(8),
}


@pytest.mark.parametrize("name", REDUCTIONS)
def test_products_over_pairs_of_positions_are_finite(name: str) -> None:
    factors = _wide(torch.float64)
    rows = factors.block("w")
    plain = Factored.of_arrays({"w": rows}, one_output=False)
    found, expected = REDUCTIONS[name](factors), REDUCTIONS[name](plain)
    assert naive.difference(found, expected) <= naive.TOLERANCE
