"""Models that register hooks on their own submodules, or remove them, in their forward pass."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gradbox_engine import CoupledShards, Group, Objective, set_gradient
from gradbox_engine.per_sample import jacobian
from tests.device import DEVICE
from tests.engine.interrupted import Kept, Killed, KilledAt
from tests.engine.per_sample import naive as rows
from tests.engine.ranges.running import even, set_gradient_in_ranges
from tests.oracle import TOLERANCE, difference


class _Collecting(nn.Module):
    """Returns its layers' outputs, which hooks collect that its first call registers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(5, 5), nn.Linear(5, 5)
        self.to(DEVICE, torch.float64)
        self.hooked = False

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        if not self.hooked:
            for layer in (self.a, self.b):
                layer.register_forward_hook(lambda _m, _i, out: self.found.append(out))
            self.hooked = True
        self.found: list[Tensor] = []
        self.b(self.a(x).tanh())
        found = tuple(self.found)
        del self.found
        return found


class _AtFirst(nn.Module):
    """Doubles its output in its first call, by a hook that removes itself."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a = nn.Linear(5, 3)
        self.to(DEVICE, torch.float64)

        def double(_m: nn.Module, _i: Any, out: Tensor) -> Tensor:
            handle.remove()
            return out * 2

        handle = self.a.register_forward_hook(double)

    def forward(self, x: Tensor) -> tuple[int, Tensor]:
        return 0, self.a(x).tanh()


KINDS = [_Collecting, _AtFirst]


def _shards() -> list[dict[str, Tensor]]:
    numbers = torch.Generator().manual_seed(1)
    return [{"x": torch.randn(n, 5, dtype=torch.float64, generator=numbers)} for n in (3, 2, 1)]


def _loss(z: Tensor) -> Tensor:
    return z.sum(0).square().sum()


def _found(model: nn.Module, **terms: Any) -> dict[str, Tensor]:
    return set_gradient(model, [Group("z", _shards())], Objective(_loss), output=1, **terms).grads


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("retain", [0, 10**9])
def test_a_replay_finds_the_hooks_of_the_first_pass(kind, retain):
    model, naive = kind(), kind()
    _loss(torch.cat([naive(x["x"].to(DEVICE))[1] for x in _shards()])).backward()
    expected = {name: p.grad for name, p in naive.named_parameters()}
    for _ in range(2):
        assert difference(_found(model, retain=retain), expected) <= TOLERANCE


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_those_of_the_first_call(kind):
    shard = {"x": _shards()[0]["x"].to(DEVICE)}
    naive = kind()
    expected = rows.flat(rows.rows(naive(**shard)[1], dict(naive.named_parameters())))
    found = jacobian(kind(), [shard], output=1)
    assert rows.difference(rows.flat(found.arrays), expected) <= rows.TOLERANCE


@pytest.mark.parametrize("kind", KINDS)
def test_shards_that_change_them_are_not_split(kind):
    groups = [Group("z", _shards())]
    with pytest.raises(CoupledShards, match=r"hooks|attribute 'hooked'"):
        set_gradient_in_ranges(kind(), even(groups, 3), groups, Objective(_loss), output=1)


@pytest.mark.parametrize("kind", KINDS)
def test_a_killed_job_goes_on_with_the_hooks_or_begins_again(kind):
    expected, kept = _found(kind()), Kept()
    with pytest.raises(Killed):
        _found(kind(), checkpoints=kept, observer=KilledAt("replay", 1))
    assert bool(kept.num_written) == (kind is _AtFirst)  # no checkpoint can name a new hook
    assert difference(_found(kind(), checkpoints=kept), expected) <= TOLERANCE
