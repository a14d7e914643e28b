"""Models that checkpoint their own activations."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from gradbox_engine import Objective, set_gradient
from tests.engine.drawn_modules import Reversed
from tests.oracle import TOLERANCE, difference
from tests.stateful_models import Reversing, groups, loss, loss_of_some, naive_answer


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
