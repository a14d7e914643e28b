"""Models whose gradients alone depend on tensors that they keep and no snapshot does."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gradbox_engine import (
    CoupledShards,
    FirstOutputs,
    Objective,
    gradient_at_cotangents,
    set_gradient,
    set_outputs,
)
from tests.device import DEVICE, same_bits
from tests.engine.drawn_modules import Reversed
from tests.engine.interrupted import Kept, Killed, KilledAt
from tests.engine.ranges.running import even, set_gradient_in_ranges
from tests.engine.replay.reversing import Reversing, groups, loss, loss_of_some, naive_gradients
from tests.oracle import TOLERANCE, difference


class _ByLength(Reversing):
    """Reverses its gradient by how many outputs it holds, with their graphs."""

    def begin(self) -> Any:
        return []

    def note(self, z: Tensor) -> int:
        self.kept.append(z)
        return len(self.kept)

    def forward(self, x: Tensor) -> Tensor:
        z = self.linear(x)
        return Reversed.apply(z, 0.5 * self.note(z)).tanh()


class _OfDeque(_ByLength):
    def begin(self) -> Any:
        return deque(maxlen=3)


class _OfDict(_ByLength):
    def begin(self) -> Any:
        return {}

    def note(self, z: Tensor) -> int:
        self.kept[f"call {len(self.kept)}"] = z.detach()
        return len(self.kept)


class _OfListInObject(_ByLength):
    def begin(self) -> Any:
        return SimpleNamespace(seen=[])

    def note(self, z: Tensor) -> int:
        self.kept.seen.append(z)
        return len(self.kept.seen)


class _OfListInNewObject(_ByLength):
    def begin(self) -> Any:
        return SimpleNamespace(seen=[])

    def note(self, z: Tensor) -> int:
        self.kept = SimpleNamespace(seen=[*self.kept.seen, z])
        return len(self.kept.seen)


class _ThatShrinks(_ByLength):
    def begin(self) -> Any:
        return [torch.zeros(1) for _ in range(9)]

    def note(self, z: Tensor) -> int:
        self.kept.pop()
        return len(self.kept)


class _InTurns(_ByLength):
    """By whether it holds the output before."""

    def begin(self) -> Any:
        return None

    def note(self, z: Tensor) -> int:
        self.kept = z if self.kept is None else None
        return 1 if self.kept is None else 3


class _ByAverage(_ByLength):
    """By an average that each call binds anew."""

    def begin(self) -> Any:
        return torch.zeros((), dtype=torch.float64, device=DEVICE)

    def note(self, z: Tensor) -> Any:
        self.kept = 0.5 * self.kept + z.detach().abs().mean()
        return float(self.kept)


class _ByLateAverage(_ByAverage):
    def begin(self) -> Any:
        return {"mean": None}

    def note(self, z: Tensor) -> Any:
        mean = z.detach().abs().mean()
        before = self.kept["mean"]
        self.kept["mean"] = mean if before is None else 0.5 * before + mean
        return float(self.kept["mean"])


class _ByFunction(_ByLength):
    """By functions that it exchanges."""

    def begin(self) -> Any:
        self.one, self.other = (lambda: 1), (lambda: 3)

    def note(self, z: Tensor) -> int:
        self.one, self.other = self.other, self.one
        return self.one()


class _ByLeaf(nn.Module):
    """Scales by one of two equal parameters that a list holds, in turns."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(5, 3)
        self.one, self.other = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
        self.to(DEVICE, torch.float64)
        self.pair = [self.one, self.other]

    def forward(self, x: Tensor) -> Tensor:
        self.pair.reverse()
        return (self.linear(x) * self.pair[0]).tanh()


KINDS = [
    _ByLength,
    _OfDeque,
    _OfDict,
    _OfListInObject,
    _OfListInNewObject,
    _ThatShrinks,
    _InTurns,
    _ByAverage,
    _ByLateAverage,
    _ByFunction,
    _ByLeaf,
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("retain", [0, 1000, 10**9])
@pytest.mark.parametrize("of", [loss, loss_of_some])
def test_a_replay_finds_what_the_first_pass_found_and_so_does_the_next_job(kind, retain, of):
    model, expected = kind(), naive_gradients(kind, of)
    for _ in range(2):
        found = set_gradient(model, groups(), Objective(of), mode="train", retain=retain)
        assert difference(found.grads, expected) <= TOLERANCE


@pytest.mark.parametrize("kind", KINDS)
def test_the_second_half_does_from_outputs_alone(kind):
    model = kind()
    first = set_outputs(model, groups(), mode="train", retain=10**9)
    z = first.outputs["z"]
    assert isinstance(z, Tensor)
    z = z.clone().requires_grad_()
    (cotangent,) = torch.autograd.grad(loss_of_some(z), z)
    assert first.kept is None
    given = FirstOutputs({"z": {"": z.detach()}}, first.rows, first.stateful)
    found = gradient_at_cotangents(model, groups(), {"z": {"": cotangent}}, given, mode="train")
    assert difference(found.grads, naive_gradients(kind, loss_of_some)) <= TOLERANCE


@pytest.mark.parametrize("kind", KINDS)
def test_shards_that_change_it_are_not_split(kind):
    shards = groups()
    with pytest.raises(CoupledShards, match=r"attribute|objects"):
        set_gradient_in_ranges(kind(), even(shards, 2), shards, Objective(loss), mode="train")


@pytest.mark.parametrize("place", [("forward", 3), ("replay", 3)])
@pytest.mark.parametrize("kind", KINDS)
def test_a_killed_job_goes_on_from_no_shard_after_the_first(kind, place):
    expected = set_gradient(kind(), groups(), Objective(loss), mode="train", retain=0)
    how: Any = {"mode": "train", "retain": 0, "checkpoints": Kept()}
    with pytest.raises(Killed):
        set_gradient(kind(), groups(), Objective(loss), observer=KilledAt(*place), **how)
    assert how["checkpoints"].num_written <= 1
    found = set_gradient(kind(), groups(), Objective(loss), **how)
    assert all(same_bits(found.grads[name], grad) for name, grad in expected.grads.items())


class _Caching(_ByLength):
    """Keeps the like of its latest output in each call, and a constant that the first one makes."""

    def begin(self) -> Any:
        return SimpleNamespace(latest=None, mask=None)

    def note(self, z: Tensor) -> int:
        self.kept.latest = [z]
        self.kept.mask = torch.ones(3, device=DEVICE)
        self.latest, self.mask = z, torch.zeros(3, device=DEVICE)
        return 2


def test_the_like_in_every_call_costs_no_graph():
    found = set_gradient(_Caching(), groups(), Objective(loss), mode="train", retain=10**9)
    assert found.retained == 5
    assert difference(found.grads, naive_gradients(_Caching)) <= TOLERANCE
    set_gradient_in_ranges(_Caching(), even(groups(), 2), groups(), Objective(loss), mode="train")
