"""All outputs' gradients at the recorded edges in one backward pass."""

from __future__ import annotations

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

from gradbox_engine.per_sample import jacobian
from gradbox_engine.per_sample.backward import RecordedGraph, batched_gradients
from tests.engine.per_sample import naive

B, Y = 3, 4


def test_gradients_for_many_cotangents_are_torch_s_own() -> None:
    torch.manual_seed(0)
    first, second = nn.Linear(5, 6), nn.Linear(6, Y)
    h = first(torch.randn(B, 5))
    apart = torch.randn(B, requires_grad=True).exp()
    z = second(h.tanh())
    edges = [get_gradient_edge(h), get_gradient_edge(z), get_gradient_edge(apart)]
    cotangents = torch.eye(Y)[:, None].expand(Y, B, Y)
    expected = torch.autograd.grad(
        z, edges, cotangents, retain_graph=True, allow_unused=True, is_grads_batched=True
    )
    found = batched_gradients(z, edges, cotangents, keep_graph=False)
    assert found[2] is expected[2] is None
    for mine, theirs in zip(found[:2], expected[:2], strict=True):
        assert mine is not None
        assert torch.equal(mine, theirs)


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
