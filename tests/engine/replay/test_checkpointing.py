"""Models that checkpoint their own activations."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gradbox_engine import Group, Objective, set_gradient, shard_stream
from tests.engine.drawn_modules import Reversed
from tests.oracle import TOLERANCE, difference
from tests.stateful_models import Reversing, groups, loss, loss_of_some, naive_answer


class _Checkpointed(nn.Module):
    """Two checkpointed blocks, with dropout, around one weight that is also used outside."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.reentrant = reentrant
        self.shared = nn.Linear(4, 4).double()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.4), nn.Tanh(), self.shared).double()
            for _ in range(2)
        )
        self.plain = [torch.ones(4, dtype=torch.float64, requires_grad=True)]
        self.leaf = torch.ones(4, dtype=torch.float64, requires_grad=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.shared(x) * self.leaf
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return x


def _shards() -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [{"0": torch.randn(3, 4, generator=generator, dtype=torch.float64)} for _ in range(3)]


def _loss(z: Tensor) -> Tensor:
    return (z @ z.T).exp().mean()


@pytest.mark.parametrize("retain", [0, 10**9])
@pytest.mark.parametrize("reentrant", [False, True])
def test_the_gradient_is_that_of_naive_code(reentrant, retain):
    model = _Checkpointed(reentrant=reentrant).train()
    zs = []
    for i, shard in enumerate(_shards()):
        with shard_stream(5, 0, i):
            zs.append(model(shard["0"]))
    _loss(torch.cat(zs)).backward()
    expected = {name: p.grad for name, p in model.named_parameters()}
    job = _Checkpointed(reentrant=reentrant)
    result = set_gradient(
        job, [Group("z", _shards())], Objective(_loss), mode="train", seed=5, retain=retain
    )
    assert difference(result.grads, expected) <= TOLERANCE
    assert job.leaf.grad is None


def _counted(m: Any, _: Tensor) -> float:
    m.kept = SimpleNamespace(calls=m.kept.calls + 1)
    return float(m.kept.calls)


class _CountingInBlock(Reversing):
    """Counts within a block that its backward pass calls once more."""

    def forward(self, x: Tensor) -> Tensor:
        z: Tensor = checkpoint(self.block, self.linear(x), use_reentrant=True)
        return z.tanh()

    def block(self, z: Tensor) -> Tensor:
        found: Tensor = Reversed.apply(z, 0.5 * self.strength(self, z))
        return found


def _model(kind: type[Reversing], strength: Callable[[Any, Tensor], float]) -> Reversing:
    return kind(strength, kept=lambda: SimpleNamespace(calls=0))


@pytest.mark.parametrize("retain", [0, 1000, 10**9])
@pytest.mark.parametrize("of", [loss, loss_of_some])
def test_what_a_backward_pass_counts_is_not_found_by_the_next_shard(retain, of):
    job = _model(_CountingInBlock, _counted)
    found = set_gradient(job, groups(), Objective(of), mode="train", retain=retain)
    later = naive_answer(lambda: _model(Reversing, lambda m, z: _counted(m, z) + 1), of)
    assert difference(found.grads, later.grads) <= TOLERANCE  # what that call finds
