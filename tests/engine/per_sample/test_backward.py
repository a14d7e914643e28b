"""All outputs' gradients at the recorded edges in one backward pass."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

from gradbox_engine.per_sample import gradients, jacobian
from gradbox_engine.per_sample.backward import RecordedGraph
from tests.engine.per_sample import naive
from tests.engine.per_sample.zoo import Written

B, Y = 3, 4


def test_this_version_of_torch_has_what_lies_under_its_batched_gradients() -> None:
    assert gradients.DIRECT


@pytest.mark.parametrize("direct", [True, False])
def test_gradients_for_many_cotangents_are_torch_s_own(monkeypatch, direct) -> None:
    monkeypatch.setattr(gradients, "DIRECT", direct)
    torch.manual_seed(0)
    first, second = nn.Linear(5, 6), nn.Linear(6, Y)
    h = first(torch.randn(B, 5))
    apart = torch.randn(B, requires_grad=True).exp()
    z = second(h.tanh())
    wanted = [get_gradient_edge(h), get_gradient_edge(z), get_gradient_edge(apart), first.weight]
    cotangents = torch.eye(Y)[:, None].expand(Y, B, Y)
    expected = torch.autograd.grad(
        z, wanted, cotangents, retain_graph=True, allow_unused=True, is_grads_batched=True
    )
    found = gradients.batched_gradients(z, wanted, cotangents, keep_graph=False)
    assert found[2] is expected[2] is None
    for mine, theirs in zip(found, expected, strict=True):
        assert mine is theirs or torch.equal(mine, theirs)


FIRST_CALLS = """
import sys
import torch
from gradbox_engine.per_sample import jacobian, per_sample_gradient

model, shard = torch.nn.Linear(3, 2), {"0": torch.randn(4, 3)}
before = set(sys.modules)
jacobian(model, [shard])
jacobian(model, [shard], reduce="vjp", vectors=torch.ones(4, 2))
per_sample_gradient(model, [shard], lambda z: z.square().sum(1))
print(*sorted(set(sys.modules) - before))
"""


def test_the_first_calls_of_a_process_import_nothing() -> None:
    command = [sys.executable, "-c", FIRST_CALLS]
    run = subprocess.run(command, check=True, capture_output=True, text=True)
    assert run.stdout.split() == []


@pytest.mark.parametrize("direct", [True, False])
def test_a_cotangent_gives_torch_s_gradient_and_keeps_the_graph_if_told_to(
    monkeypatch, direct
) -> None:
    monkeypatch.setattr(gradients, "DIRECT", direct)
    torch.manual_seed(0)
    x, apart = torch.randn(B, Y, requires_grad=True), torch.ones(1, requires_grad=True)
    z, cotangent = x.exp(), torch.randn(B, Y)
    for keep_graph in (True, False):
        found = gradients.gradients(z, [x, apart], cotangent, keep_graph=keep_graph)
        assert found[1] is None
        torch.testing.assert_close(found[0], cotangent * z.detach())
    with pytest.raises(RuntimeError, match="second time"):
        gradients.gradients(z, [x], cotangent, keep_graph=False)


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
        gradients.batched_gradients(Refuses.apply(x), [x], torch.ones(Y, 2), keep_graph=False)
    assert torch.vmap(torch.sin)(torch.zeros(2, 3)).shape == (2, 3)


def test_a_sparse_product_takes_the_outputs_one_after_another() -> None:
    torch.manual_seed(0)
    model = Written(lambda m, x: torch.sparse.mm(m.mix, m.a(x).t()).t(), a=nn.Linear(5, Y)).double()
    model.register_buffer("mix", torch.eye(Y, dtype=torch.float64).roll(1, 0).to_sparse())
    inputs = {"0": torch.randn(B, 5).double()}
    found = naive.flat(jacobian(model, [inputs]).arrays)
    assert naive.difference(found, naive.flat(naive.jacobian(model, inputs))) <= naive.TOLERANCE


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
