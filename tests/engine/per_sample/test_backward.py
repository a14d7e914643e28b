"""All outputs' gradients at the recorded edges in one backward pass."""

from __future__ import annotations

import torch
from torch import nn

from gradbox_engine.per_sample import jacobian
from gradbox_engine.per_sample.backward import RecordedGraph
from tests.engine.per_sample import naive

B, Y = 3, 4


def test_outputs_one_after_another_give_the_same_rows(monkeypatch) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, Y)).double()
    inputs = {"0": torch.randn(B, 5).double()}
    together = jacobian(model, [inputs], unchecked=["self"])
    monkeypatch.setattr(RecordedGraph, "_backward", _one_after_another)
    apart = jacobian(model, [inputs], unchecked=["self"])
    assert naive.difference(naive.flat(apart.arrays), naive.flat(together.arrays)) < 1e-14


def _one_after_another(self, edges, outputs, *, keep):
    rows = [torch.autograd.grad(self.value[:, y].sum(), edges, retain_graph=True) for y in outputs]
    return [torch.stack(parts) for parts in zip(*rows, strict=True)]
