"""Models that exchange equal submodules or parameters in each call, or switch a class."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gradbox_engine import CoupledShards, Objective, set_gradient
from gradbox_engine.per_sample import jacobian
from tests.device import DEVICE, same_bits
from tests.engine.interrupted import Kept, Killed, KilledAt
from tests.engine.per_sample import naive as rows
from tests.engine.ranges.running import even, set_gradient_in_ranges
from tests.engine.replay.reversing import groups, loss, loss_of_some, naive_gradients
from tests.oracle import TOLERANCE, difference


def _linear() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(5, 3)


class _Submodules(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = _linear(), _linear()
        self.to(DEVICE, torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        self.one, self.other = self.other, self.one
        return self.one(x).tanh()  # type: ignore[no-any-return]


class _InList(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([_linear(), _linear(), _linear()])
        self.to(DEVICE, torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        self.layers.append(self.layers.pop(0))
        return self.layers[0](x).tanh()  # type: ignore[no-any-return]


class _Parameters(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = _linear()
        self.one, self.other = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
        self.to(DEVICE, torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        self.one, self.other = self.other, self.one
        return (self.linear(x) * self.one).tanh()  # type: ignore[no-any-return]


class _Half(nn.Module):
    """The identity, with half its gradient."""

    def forward(self, h: Tensor) -> Tensor:
        return 0.5 * (h + h.detach())


class _Classes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.switched = _linear(), nn.Identity()
        self.to(DEVICE, torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        is_half = isinstance(self.switched, _Half)
        self.switched.__class__ = nn.Identity if is_half else _Half
        return self.switched(self.linear(x)).tanh()  # type: ignore[no-any-return]


KINDS = [_Submodules, _InList, _Parameters, _Classes]


def _by_name(model: nn.Module) -> dict[str, int]:
    registered = (*model.named_parameters(), *model.named_modules())
    return {f"{name} {type(one).__name__}": id(one) for name, one in registered}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("retain", [0, 1000, 10**9])
@pytest.mark.parametrize("of", [loss, loss_of_some])
def test_a_replay_finds_them_as_the_first_pass_did_and_so_does_the_next_job(kind, retain, of):
    model, expected = kind(), naive_gradients(kind, of)
    before = _by_name(model)
    for _ in range(2):
        found = set_gradient(model, groups(), Objective(of), mode="train", retain=retain)
        assert difference({n: found.grads[n] for n in expected}, expected) <= TOLERANCE
        assert not any(g.any() for n, g in found.grads.items() if n not in expected)
        assert _by_name(model) == before


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_those_of_the_first_call(kind):
    shard = {"x": groups()[0].shards[1]["x"].to(DEVICE)}
    naive = kind().train()
    named = dict(naive.named_parameters())
    expected = rows.flat(rows.rows(naive(**shard), named))
    found = jacobian(kind(), [shard], mode="train")
    assert rows.difference(rows.flat(found.arrays), expected) <= rows.TOLERANCE


@pytest.mark.parametrize("kind", KINDS)
def test_shards_that_exchange_them_are_not_split(kind):
    shards = groups()
    with pytest.raises(CoupledShards, match="submodules"):
        set_gradient_in_ranges(kind(), even(shards, 2), shards, Objective(loss), mode="train")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("place", [("forward", 3), ("replay", 3)])
def test_a_killed_job_goes_on_with_them(kind, place):
    expected = set_gradient(kind(), groups(), Objective(loss), mode="train", retain=0)
    how: Any = {"mode": "train", "retain": 0, "checkpoints": Kept()}
    with pytest.raises(Killed):
        set_gradient(kind(), groups(), Objective(loss), observer=KilledAt(*place), **how)
    found = set_gradient(kind(), groups(), Objective(loss), **how)
    assert all(same_bits(found.grads[name], grad) for name, grad in expected.grads.items())
