"""All outputs' gradients at the recorded edges in one backward pass."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from gradbox_engine.per_sample import gradients, jacobian
from gradbox_engine.per_sample.backward import RecordedGraph
from tests.engine.per_sample import naive

B, Y = 3, 4


def test_a_cotangent_gives_torch_s_gradient_and_keeps_the_graph_if_told_to() -> None:
    torch.manual_seed(0)
    x, apart = torch.randn(B, Y, requires_grad=True), torch.ones(1, requires_grad=True)
    z, cotangent = x.exp(), torch.randn(B, Y)
    for keep_graph in (True, False):
        found = gradients.gradients(z, [x, apart], cotangent, keep_graph=keep_graph)
        assert found[1] is None
        torch.testing.assert_close(found[0], cotangent * z.detach())
    with pytest.raises(RuntimeError, match="second time"):
        gradients.gradients(z, [x], cotangent, keep_graph=False)


def test_torch_has_its_own_apply_again_after_a_job() -> None:
    before = vars(torch.autograd.Function)["apply"]
    jacobian(nn.Linear(5, Y), [{"0": torch.randn(B, 5)}])
    assert vars(torch.autograd.Function)["apply"] is before


def test_an_operation_without_a_batching_rule_leaves_torch_as_it_was() -> None:
    class Refuses(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, g):
            raise RuntimeError("no batching rule")

    x = torch.ones(2, requires_grad=True)
    with pytest.raises(RuntimeError, match="batching rule"):
        gradients.gradients(Refuses.apply(x), [x], torch.ones(Y, 2), keep_graph=False, batched=True)
    assert torch.vmap(torch.sin)(torch.zeros(2, 3)).shape == (2, 3)


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
