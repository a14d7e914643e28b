"""Models whose gradients alone depend on tensors that they keep and no snapshot does."""

from __future__ import annotations

import itertools
from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gradbox_engine import (
    CoupledShards,
    FirstOutputs,
    Group,
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


IN_ORDER = [_ByLength, _OfDeque, _OfListInObject, _OfListInNewObject, _InTurns]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("retain", [0, 1000, 10**9])
@pytest.mark.parametrize("of", [loss, loss_of_some])
def test_a_replay_finds_what_the_first_pass_found_and_so_does_the_next_job(kind, retain, of):
    model, expected = kind(), naive_gradients(kind, of)
    for _ in range(2):
        found = set_gradient(model, groups(), Objective(of), mode="train", retain=retain)
        assert difference(found.grads, expected) <= TOLERANCE


@pytest.mark.parametrize("kind", KINDS)
def test_where_a_kept_graph_had_no_memory_all_shards_are_called_again_in_order(kind):
    model, passes = kind(), itertools.count()

    def short_at_first(_gradient: Tensor) -> None:
        if next(passes) == 0:
            raise torch.OutOfMemoryError("short")

    model.linear.weight.register_hook(short_at_first)
    found = set_gradient(model, groups(), Objective(loss), mode="train")
    assert found.replayed == 5
    assert difference(found.grads, naive_gradients(kind)) <= TOLERANCE


class _ByFirstCall(_ByLength):
    """By whether an output is cached."""

    def begin(self) -> Any:
        return None

    def note(self, z: Tensor) -> int:
        first, self.kept = self.kept is None, z
        return 1 if first else 2


class _OnceCached(_ByLength):
    """By a number that the first call finds in its shard."""

    def begin(self) -> Any:
        return None

    def note(self, z: Tensor) -> Any:
        if self.kept is None:
            self.kept = z.detach().abs().mean()
        return float(self.kept)


class _OnceCachedInObject(_OnceCached):
    def begin(self) -> Any:
        return SimpleNamespace(size=None)

    def note(self, z: Tensor) -> Any:
        if self.kept.size is None:
            self.kept.size = z.detach().abs().mean()
        return float(self.kept.size)


ONCE = [_OnceCached, _OnceCachedInObject]


@pytest.mark.parametrize("kind", [*KINDS, *ONCE, _ByFirstCall])
def test_the_second_half_does_from_outputs_alone(kind):
    model = kind()
    first = set_outputs(model, groups(), mode="train", retain=0)
    z = first.outputs["z"]
    assert isinstance(z, Tensor)
    z = z.clone().requires_grad_()
    (cotangent,) = torch.autograd.grad(loss_of_some(z), z)
    given = FirstOutputs({"z": {"": z.detach()}}, first.rows, first.stateful)
    found = gradient_at_cotangents(model, groups(), {"z": {"": cotangent}}, given, mode="train")
    assert difference(found.grads, naive_gradients(kind, loss_of_some)) <= TOLERANCE


@pytest.mark.parametrize("kind", IN_ORDER)
def test_no_graph_waits_for_a_second_half_that_would_replay_others_out_of_order(kind):
    found = set_outputs(kind(), groups(), mode="train", retain=10**9)
    assert (found.kept, found.retained) == (None, 0)


@pytest.mark.parametrize("kind", [*KINDS, *ONCE])
def test_shards_that_change_it_are_not_split(kind):
    shards = groups()
    with pytest.raises(CoupledShards, match=r"attribute|objects"):
        set_gradient_in_ranges(kind(), even(shards, 2), shards, Objective(loss), mode="train")


@pytest.mark.parametrize("kind", [_ByLength, _OfDeque, _OfDict, _OfListInObject, *ONCE])
def test_nor_are_single_shards(kind):
    shards = [Group("z", groups()[0].shards[:2])]
    with pytest.raises(CoupledShards, match=r"attribute|objects"):
        set_gradient_in_ranges(kind(), even(shards, 2), shards, Objective(loss), mode="train")


@pytest.mark.parametrize("place", [("forward", 3), ("replay", 3)])
@pytest.mark.parametrize("kind", [*KINDS, *ONCE])
def test_a_killed_job_has_the_same_bits(kind, place):
    expected = set_gradient(kind(), groups(), Objective(loss), mode="train", retain=0)
    how: Any = {"mode": "train", "retain": 0, "checkpoints": Kept()}
    with pytest.raises(Killed):
        set_gradient(kind(), groups(), Objective(loss), observer=KilledAt(*place), **how)
    found = set_gradient(kind(), groups(), Objective(loss), **how)
    assert all(same_bits(found.grads[name], grad) for name, grad in expected.grads.items())


@pytest.mark.parametrize("kind", ONCE)
@pytest.mark.parametrize("of", [loss, loss_of_some])
def test_what_the_first_shard_leaves_for_all_costs_no_graph(kind, of):
    model = kind()
    found = set_gradient(model, groups(), Objective(of), mode="train", retain=10**9)
    assert found.replayed == 0
    found = set_gradient(model, groups(), Objective(of), mode="train", retain=0)
    assert difference(found.grads, naive_gradients(kind, of)) <= TOLERANCE


class _Caching(_ByLength):
    """Keeps its latest output in each call, and an equal number in the place of another."""

    def begin(self) -> Any:
        self.mask = torch.ones(3, device=DEVICE)
        return SimpleNamespace(latest=None)

    def note(self, z: Tensor) -> int:
        first = self.kept.latest is None
        self.kept.latest = (z, None)
        self.latest, self.mask = z, torch.ones(3, device=DEVICE)
        return 1 if first else 2


@pytest.mark.parametrize("place", [("forward", 3), ("replay", 1)])
def test_a_killed_job_goes_on_with_the_like_of_what_was_cached(place):
    kept = Kept()
    how: Any = {"mode": "train", "retain": 0, "checkpoints": kept}
    with pytest.raises(Killed):
        set_gradient(
            _ByFirstCall(), groups(), Objective(loss_of_some), observer=KilledAt(*place), **how
        )
    found = set_gradient(_ByFirstCall(), groups(), Objective(loss_of_some), **how)
    assert kept.num_written > 1
    assert difference(found.grads, naive_gradients(_ByFirstCall, loss_of_some)) <= TOLERANCE


def test_the_like_in_every_call_costs_no_graph_and_no_device():
    found = set_gradient(_Caching(), groups(), Objective(loss), mode="train", retain=10**9)
    assert found.retained == 5
    assert difference(found.grads, naive_gradients(_Caching)) <= TOLERANCE
    set_gradient_in_ranges(_Caching(), even(groups(), 2), groups(), Objective(loss), mode="train")
