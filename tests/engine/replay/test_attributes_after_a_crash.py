"""Jobs on models that keep state as plain attributes, killed and gone on from a checkpoint."""

from __future__ import annotations

import itertools
import json
from collections import Counter, deque
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gradbox_engine import Group, Objective, ReplayMismatch, set_gradient, set_outputs
from gradbox_engine.model.state.model_state import ModelState
from gradbox_engine.model.state.stated import can_be_stated, from_stated, stated
from tests.device import DEVICE, same_bits
from tests.engine.interrupted import Kept, Killed, KilledAt
from tests.engine.replay.reversing import Reversing


class _InTuple(Reversing):
    def begin(self) -> Any:
        return (0, "calls")

    def strength(self) -> float:
        self.kept = (self.kept[0] + 1, "calls")
        return self.kept[0]


class _ByWholeNumber(Reversing):
    def begin(self) -> Any:
        return {}

    def strength(self) -> float:
        self.kept[7] = self.kept.get(7, 0) + 1
        return self.kept[7]


class _InSet(Reversing):
    def begin(self) -> Any:
        return set()

    def strength(self) -> float:
        self.kept.add(len(self.kept))
        return len(self.kept)


class _InDeque(Reversing):
    def begin(self) -> Any:
        return deque([1], maxlen=2)

    def strength(self) -> float:
        self.kept.append(sum(self.kept))
        return 0.1 * self.kept[-1]


class _Infinite(Reversing):
    def begin(self) -> Any:
        return 1.0

    def strength(self) -> float:
        self.kept = 1.0 if self.kept == float("inf") else float("inf")
        return min(self.kept, 3.0)


class _InCounter(Reversing):
    """In a type that no JSON value brings back, so that it is filled anew."""

    def begin(self) -> Any:
        return Counter()

    def strength(self) -> float:
        self.kept["calls"] += 1
        return self.kept["calls"] + self.kept["others"]


class _BesideTensor(Reversing):
    """Beside a tensor with a graph, which no state keeps."""

    def begin(self) -> Any:
        return 0

    def strength(self) -> float:
        self.kept += 1
        return self.kept

    def forward(self, x: Tensor) -> Tensor:
        self.latest = super().forward(x)
        return self.latest


KINDS = [_InTuple, _ByWholeNumber, _InSet, _InDeque, _Infinite, _InCounter, _BesideTensor]


def _groups() -> list[Group]:
    numbers = torch.Generator().manual_seed(1)
    shards = [{"x": torch.randn(n, 5, dtype=torch.float64, generator=numbers)} for n in (2, 3, 1)]
    return [Group("z", [*shards, *shards])]


def _loss(z: Tensor) -> Tensor:
    return z.sum(0).square().sum()


@pytest.mark.parametrize("place", [("forward", 3), ("replay", 3)])
@pytest.mark.parametrize("retain", [0, 10**9])
@pytest.mark.parametrize("kind", KINDS)
def test_a_killed_job_goes_on_with_the_numbers_that_it_had(kind, retain, place):
    how: Any = {"mode": "train", "retain": retain}
    expected = set_gradient(kind(), _groups(), Objective(_loss), **how)
    kept, killed = Kept(), KilledAt(*place)
    how["checkpoints"] = kept
    with pytest.raises(Killed):
        set_gradient(kind(), _groups(), Objective(_loss), observer=killed, **how)
    assert kept.num_written
    found = set_gradient(kind(), _groups(), Objective(_loss), **how)
    assert all(same_bits(found.grads[name], grad) for name, grad in expected.grads.items())


class _CountingByIterator(nn.Linear):
    """Scales its output by a count that no snapshot has."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(5, 3, dtype=torch.float64, device=DEVICE)
        self.calls = itertools.count(1)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * next(self.calls)


def test_outputs_that_read_what_no_checkpoint_has_are_not_gone_on_with():
    kept, kind = Kept(), _CountingByIterator
    with pytest.raises(Killed):
        set_outputs(kind(), _groups(), checkpoints=kept, observer=KilledAt("forward", 3))
    with pytest.raises(ReplayMismatch, match="shard 2: expected the replay to repeat"):
        set_outputs(kind(), _groups(), checkpoints=kept)


@pytest.mark.parametrize(
    "value",
    [
        (1, (None, "a")),
        {"a": 1, 2: (3,), (4, "b"): True},
        [1, 1.0, float("inf"), -0.0],
        {1, "a"},
        deque([1, 2], maxlen=3),
        complex(-0.0, float("inf")),
        torch.bfloat16,
        torch.device("cuda", 1),
        "\ud800",
    ],
)
def test_an_attribute_comes_back_from_json_as_it_was(value):
    model = nn.Linear(1, 1)
    model.kept = None
    registered = ModelState(model)
    model.kept = value
    state = registered.state()
    assert can_be_stated(registered, state)
    told = json.loads(json.dumps(stated(registered, state)))
    model.kept = None
    registered.restore(from_stated(registered, told))
    assert repr(model.kept) == repr(value)
    assert type(model.kept) is type(value)
