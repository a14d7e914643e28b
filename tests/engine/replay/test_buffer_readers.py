"""Graphs that read buffers on their way back, and buffers that are not plain dense tensors."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gradbox_engine import Group, Objective, SetGradient, set_gradient, shard_stream
from tests.oracle import TOLERANCE, difference

PLENTY = 10**9


def _shards() -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(2)
    return [{"0": torch.randn(3, 5, generator=generator, dtype=torch.float64)} for _ in range(4)]


def _spread(z: Tensor) -> Tensor:
    return torch.exp(-torch.cdist(z, z).square()).mean()


def _job(model: nn.Module, **terms) -> SetGradient:
    return set_gradient(model, [Group("z", _shards())], Objective(_spread), **terms)


def _naive(model: nn.Module) -> dict[str, Tensor]:
    outputs = []
    for index, shard in enumerate(_shards()):
        with shard_stream(0, group=0, shard=index):
            outputs.append(model(shard["0"]))
    _spread(torch.cat(outputs)).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


class _Copying(nn.Module):
    """Scales by a moving average, of which its graph has a copy: what naive code can carry back."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(5, 4).double(), nn.Linear(4, 3).double()
        self.register_buffer("average", torch.ones(4, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        self.average.mul_(0.5).add_(h.detach().abs().mean(0))
        return self.scaled(h)

    def scaled(self, h: Tensor) -> Tensor:
        return self.block(h, self.average.clone())

    def block(self, h: Tensor, average: Tensor) -> Tensor:
        return self.second((h * average).tanh())


class _Checkpointed(_Copying):
    def scaled(self, h: Tensor) -> Tensor:
        return checkpoint(lambda h: self.block(h, self.average), h, use_reentrant=False)


class _Reentrant(_Copying):
    def scaled(self, h: Tensor) -> Tensor:
        return checkpoint(lambda h: self.block(h, self.average), h, use_reentrant=True)


class _Scale(torch.autograd.Function):
    """Keeps the factor itself, unseen by hooks on saved tensors."""

    @staticmethod
    def forward(ctx, h, factor):
        ctx.factor = factor
        return h * factor

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.factor, None


class _ByHand(_Copying):
    def scaled(self, h: Tensor) -> Tensor:
        return self.second(_Scale.apply(h, self.average).tanh())


class _LateByHand(_ByHand):
    """Its average moves in some shards alone."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if x[0, 0] > 0 else self.second(self.first(x))


@pytest.mark.parametrize("retain", [0, 1000, PLENTY, "auto"])
@pytest.mark.parametrize("kind", [_Copying, _Checkpointed, _Reentrant, _ByHand])
def test_a_graph_finds_the_buffers_as_its_shard_left_them(kind, retain):
    model = kind()
    expected = _naive(_Copying())
    for _ in range(3):
        assert difference(_job(model, retain=retain).grads, expected) <= TOLERANCE


def test_buffers_that_move_late_are_found_as_well():
    expected = _job(_LateByHand(), retain=0)
    kept = _job(_LateByHand(), retain=PLENTY)
    assert all(torch.equal(kept.grads[name], grad) for name, grad in expected.grads.items())


class _Rewriting(_Copying):
    """Writes the same numbers to a buffer in each call, as caches of positions are written."""

    def __init__(self) -> None:
        super().__init__()
        self.average.copy_(torch.arange(1.0, 5.0))

    def forward(self, x: Tensor) -> Tensor:
        self.average.copy_(torch.arange(1.0, 5.0))
        return self.second((self.first(x) * self.average).tanh())


@pytest.mark.parametrize("retain", [0, 2000, PLENTY, "auto"])
def test_a_buffer_may_be_rewritten_with_the_same_numbers(retain):
    model, without = _Rewriting(), _Rewriting()
    expected = _job(without, retain=0)
    for _ in range(2):
        result = _job(model, retain=retain)
        assert all(torch.equal(result.grads[n], grad) for n, grad in expected.grads.items())


class _Graph(nn.Module):
    """Passes features along the edges of a graph."""

    def __init__(self, edges: Tensor) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(5, 3).double()
        self.register_buffer("edges", edges)

    def forward(self, x: Tensor) -> Tensor:
        edges = self.edges
        mixed = x * edges if edges.ndim == 1 else (edges @ x.T).T
        return self.linear(mixed).tanh()


def _edges(kind: str) -> Tensor:
    dense = torch.eye(5, dtype=torch.float64).roll(1, 0) + torch.eye(5, dtype=torch.float64)
    if kind == "expanded":
        return torch.full((1,), 0.5, dtype=torch.float64).expand(5)
    return dense.to_sparse() if kind == "coo" else dense.to_sparse_csr()


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("retain", [0, PLENTY, "auto"])
@pytest.mark.parametrize("kind", ["coo", "csr", "expanded"])
def test_buffers_may_be_sparse_or_expanded(kind, retain):
    expected = _naive(_Graph(_edges(kind)))
    model = _Graph(_edges(kind)).eval()
    for mode in ("train", "eval"):
        result = _job(model, retain=retain, mode=mode, returns=("grads", "buffers"))
        assert difference(result.grads, expected) <= TOLERANCE
    assert not model.training
    assert torch.equal(model.edges.to_dense(), _edges(kind).to_dense())


class _PlainMean(_Copying):
    """Its average is no buffer but a plain attribute."""

    def __init__(self) -> None:
        super().__init__()
        del self.average
        self.average = torch.ones(4, dtype=torch.float64)


def test_a_plain_tensor_comes_out_as_it_went_in():
    model = _PlainMean()
    losses = {_job(model, retain=PLENTY).loss for _ in range(3)}
    assert len(losses) == 1
    assert torch.equal(model.average, torch.ones(4, dtype=torch.float64))
