"""Models whose gradients, and not their outputs, depend on what lies inside their attributes."""

from __future__ import annotations

import enum
import functools
import random
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from gradbox_engine import (
    CoupledShards,
    FirstOutputs,
    Group,
    Objective,
    gradient_at_cotangents,
    mixed_gradient,
    set_gradient,
    set_outputs,
)
from gradbox_engine.model.state.objects import Objects
from gradbox_engine.per_sample import jacobian
from tests.device import DEVICE, same_bits
from tests.engine.drawn_modules import Reversed
from tests.engine.interrupted import Kept, Killed, KilledAt
from tests.engine.per_sample import naive as rows
from tests.engine.ranges.running import even, set_gradient_in_ranges
from tests.oracle import TOLERANCE, difference


class _Counter:
    def __init__(self) -> None:
        self.calls = 0
        self.latest: Any = None

    def next(self) -> int:
        self.calls += 1
        return self.calls


class _Reversing(nn.Module):
    """Reverses its gradient by a strength that depends on something inside `kept`."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(5, 3)
        self.kept: Any = self.begin()
        self.to(DEVICE, torch.float64)

    def begin(self) -> Any:
        return _Counter()

    def strength(self) -> float:
        return float(self.kept.next())

    def forward(self, x: Tensor) -> Tensor:
        return Reversed.apply(self.linear(x), 0.5 * self.strength()).tanh()


class _ByDefault(_Reversing):
    """In an object that has no attributes when the job begins, but one of its class."""

    def begin(self) -> Any:
        class Counter:
            calls = 0

        return Counter()

    def strength(self) -> float:
        self.kept.calls += 1
        return float(self.kept.calls)


class _InNamespace(_Reversing):
    def begin(self) -> Any:
        return SimpleNamespace(counter=SimpleNamespace(calls=0))

    def strength(self) -> float:
        self.kept.counter.calls += 1
        return float(self.kept.counter.calls)


@dataclass(slots=True)
class _Slotted:
    calls: int = 0
    latest: list[int] = field(default_factory=list)


class _InSlots(_Reversing):
    def begin(self) -> Any:
        return _Slotted()

    def strength(self) -> float:
        self.kept.calls += 1
        self.kept.latest.append(self.kept.calls)
        return float(sum(self.kept.latest))


class _InDictInDict(_Reversing):
    def begin(self) -> Any:
        return {"counts": {"calls": 0}}

    def strength(self) -> float:
        self.kept["counts"]["calls"] += 1
        return float(self.kept["counts"]["calls"])


class _InListInTuple(_Reversing):
    def begin(self) -> Any:
        return ([1], "calls")

    def strength(self) -> float:
        self.kept[0].append(len(self.kept[0]))
        return float(sum(self.kept[0]))


class _InArray(_Reversing):
    def begin(self) -> Any:
        return np.zeros((2, 3))

    def strength(self) -> float:
        self.kept[1, 2] += 1
        return float(self.kept.sum())


class _InTensor(_Reversing):
    """A tensor that is a plain attribute, as `.to()` does not find it."""

    def begin(self) -> Any:
        return torch.zeros(2)

    def strength(self) -> float:
        self.kept[1] += 1
        return float(self.kept.sum())


class _InTensorBehindItsBack(_Reversing):
    def begin(self) -> Any:
        return {"calls": torch.zeros((), dtype=torch.int64)}

    def strength(self) -> float:
        self.kept["calls"].data += 1
        return float(self.kept["calls"])


class _InLargeTensor(_Reversing):
    """Too large for n snapshots."""

    def begin(self) -> Any:
        return SimpleNamespace(moved=torch.zeros(20_000))

    def strength(self) -> float:
        self.kept.moved += 1
        return float(self.kept.moved[0])


class _InUnregisteredModule(_Reversing):
    def begin(self) -> Any:
        module = nn.Identity()
        module.calls = 0  # type: ignore[assignment]
        return [module]

    def strength(self) -> float:
        self.kept[0].calls += 1
        return float(self.kept[0].calls)


class _BehindBoundMethod(_Reversing):
    def begin(self) -> Any:
        return functools.partial(_Counter().next)

    def strength(self) -> float:
        return float(self.kept())


class _InObjectMadeAnew(_Reversing):
    def strength(self) -> float:
        before = self.kept.latest
        self.kept.latest = SimpleNamespace(calls=[before.calls[0] + 1 if before else 1])
        return float(self.kept.latest.calls[0])


class _Phase(enum.Enum):
    WEAK = 1
    STRONG = 3


class _InEnumeration(_Reversing):
    def begin(self) -> Any:
        return SimpleNamespace(phase=_Phase.WEAK)

    def strength(self) -> float:
        is_weak = self.kept.phase is _Phase.WEAK
        self.kept.phase = _Phase.STRONG if is_weak else _Phase.WEAK
        return float(self.kept.phase.value)


class _TorchsGenerator(_Reversing):
    def begin(self) -> Any:
        return torch.Generator().manual_seed(3)

    def strength(self) -> float:
        return float(torch.rand((), generator=self.kept))


class _NumpysGenerator(_Reversing):
    def begin(self) -> Any:
        return np.random.default_rng(3)

    def strength(self) -> float:
        return float(self.kept.random())


class _NumpysRandomState(_Reversing):
    def begin(self) -> Any:
        return np.random.RandomState(3)

    def strength(self) -> float:
        return float(self.kept.normal()) ** 2


class _PythonsGenerator(_Reversing):
    def begin(self) -> Any:
        return {"draw": random.Random(3)}

    def strength(self) -> float:
        return self.kept["draw"].random()


class _BesideTensor(_Reversing):
    """Keeps a tensor with a graph in the same object."""

    def forward(self, x: Tensor) -> Tensor:
        self.kept.latest = super().forward(x)
        return self.kept.latest  # type: ignore[no-any-return]


KEPT = [
    _Reversing,
    _ByDefault,
    _InNamespace,
    _InSlots,
    _InDictInDict,
    _InListInTuple,
    _InArray,
    _InTensor,
    _InTensorBehindItsBack,
    _InUnregisteredModule,
    _BehindBoundMethod,
    _InObjectMadeAnew,
    _InEnumeration,
    _TorchsGenerator,
    _NumpysGenerator,
    _NumpysRandomState,
    _PythonsGenerator,
]
KINDS = [*KEPT, _InLargeTensor, _BesideTensor]


def _groups() -> list[Group]:
    numbers = torch.Generator().manual_seed(1)
    sizes = (2, 3, 1, 2, 1)
    shards = [torch.randn(n, 5, dtype=torch.float64, generator=numbers) for n in sizes]
    return [Group("z", [{"x": shard} for shard in shards])]


def _loss(z: Tensor) -> Tensor:
    return z.sum(0).square().sum()


def _loss_of_some(z: Tensor) -> Tensor:
    """Of the second and the fourth of five shards alone."""
    return _loss(torch.cat([z[2:5], z[6:8]]))


def _expected(
    kind: type[_Reversing], loss: Callable[[Tensor], Tensor] = _loss
) -> dict[str, Tensor]:
    model = kind().train()
    loss(torch.cat([model(**shard) for shard in _groups()[0].shards])).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("retain", [0, 1000, 10**9])
@pytest.mark.parametrize("loss", [_loss, _loss_of_some])
def test_a_replay_finds_what_the_first_pass_found_and_so_does_the_next_job(kind, retain, loss):
    model, expected = kind(), _expected(kind, loss)
    for _ in range(2):
        found = set_gradient(model, _groups(), Objective(loss), mode="train", retain=retain)
        assert difference(found.grads, expected) <= TOLERANCE


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("retain", [0, 1000, 10**9])
def test_the_second_half_does_in_another_job(kind, retain):
    model = kind()
    first = set_outputs(model, _groups(), mode="train", retain=retain)
    z = first.outputs["z"]
    assert isinstance(z, Tensor)
    z = z.clone().requires_grad_()
    (cotangent,) = torch.autograd.grad(_loss(z), z)
    given = first.kept or FirstOutputs({"z": {"": z.detach()}}, first.rows, first.stateful)
    found = gradient_at_cotangents(model, _groups(), {"z": {"": cotangent}}, given, mode="train")
    assert difference(found.grads, _expected(kind)) <= TOLERANCE


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_those_of_the_first_call(kind):
    shard = _groups()[0].shards[1]
    expected = rows.flat(rows.jacobian(kind().train(), shard))
    model = kind()
    for _ in range(2):
        found = jacobian(model, [shard], mode="train")
        assert rows.difference(rows.flat(found.arrays), expected) <= rows.TOLERANCE


@pytest.mark.parametrize("kind", KEPT)
def test_the_tangent_pass_of_a_mixed_gradient_finds_it(kind):
    def naive(model: nn.Module, y: Tensor) -> Tensor:
        xs = [shard["x"].clone().requires_grad_() for shard in _groups()[0].shards]
        dfdz = [torch.autograd.grad((model(x) ** 2 @ y).sum(), x, create_graph=True)[0] for x in xs]
        (gradient,) = torch.autograd.grad(torch.cat(dfdz).pow(2).sum(), y)
        return gradient

    y = torch.linspace(-1, 1, 3, dtype=torch.float64).requires_grad_()
    result = mixed_gradient(
        kind(),
        _groups()[0],
        Objective(lambda y, v: (v**2 @ y).sum(), {"y": y}, {"y": y}),
        Objective(lambda dfdz: dfdz.pow(2).sum()),
        mode="train",
    )
    assert difference(result.grads, {"y": naive(kind().train(), y)}) <= TOLERANCE


@pytest.mark.parametrize("kind", KINDS)
def test_shards_that_change_it_are_not_split(kind):
    groups = _groups()
    with pytest.raises(CoupledShards, match=r"attribute 'kept|numbers in objects"):
        set_gradient_in_ranges(kind(), even(groups, 2), groups, Objective(_loss), mode="train")


@pytest.mark.parametrize("kind", KINDS)
def test_a_killed_job_begins_again(kind):
    how: Any = {"mode": "train", "retain": 0, "checkpoints": Kept()}
    expected = set_gradient(kind(), _groups(), Objective(_loss), mode="train", retain=0)
    with pytest.raises(Killed):
        set_gradient(kind(), _groups(), Objective(_loss), observer=KilledAt("replay", 3), **how)
    found = set_gradient(kind(), _groups(), Objective(_loss), **how)
    assert how["checkpoints"].num_written == 0
    assert all(same_bits(found.grads[name], grad) for name, grad in expected.grads.items())


class _Averaging(nn.Module):
    """Scales its output by a mean of its outputs so far, a tensor that its graphs save."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(5, 3, dtype=torch.float64, device=DEVICE)
        self.mean = torch.ones(3, dtype=torch.float64, device=DEVICE)

    def forward(self, x: Tensor) -> Tensor:
        z = self.linear(x)
        self.mean.mul_(0.5).add_(z.detach().mean(0))
        return z * self.mean  # type: ignore[no-any-return]


@pytest.mark.parametrize("retain", [0, 1000, 10**9])
def test_a_graph_that_saved_an_unregistered_tensor_finds_its_numbers(retain):
    model, mean = _Averaging(), torch.ones(3, dtype=torch.float64, device=DEVICE)
    zs = []
    for shard in _groups()[0].shards:
        z = model.linear(shard["x"].to(DEVICE))
        mean = 0.5 * mean + z.detach().mean(0)
        zs.append(z * mean)
    _loss(torch.cat(zs)).backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters()}
    found = set_gradient(model, _groups(), Objective(_loss), mode="train", retain=retain)
    assert difference(found.grads, expected) <= TOLERANCE
    assert torch.equal(model.mean, torch.ones_like(model.mean))


class _Caching(_Reversing):
    """Keeps its latest output, with its graph, and no number."""

    def forward(self, x: Tensor) -> Tensor:
        z = self.linear(x).tanh()
        self.kept.latest = [z]
        return z  # type: ignore[no-any-return]


def test_a_cached_tensor_is_in_no_snapshot_and_changes_nothing():
    model = _Caching().train()
    objects = Objects(model.named_modules())
    z = model(_groups()[0].shards[0]["x"])
    state, graph = objects.state(), weakref.ref(z)
    assert not objects.lost
    objects.restore(None)
    del z
    assert graph() is None
    assert state is not None
    assert set(state.values()) == {None}


def test_equal_numbers_and_empty_containers_that_are_bound_anew_are_no_change():
    model = _Reversing()
    model.kept.calls, model.kept.latest = 1000, {"seen": set()}
    objects = Objects(model.named_modules())
    model.kept.calls, model.kept.latest["seen"] = int("1000"), set()
    assert objects.state() is None


def test_what_a_model_holds_of_libraries_is_left_alone():
    class WithLock(_Reversing):
        def begin(self) -> Any:
            import logging

            return {"log": logging.getLogger("a.b"), "counter": _Counter()}

    model = WithLock()
    objects = Objects(model.named_modules())
    model.kept["log"].extra = 1
    model.kept["counter"].calls = 2
    objects.restore(None)
    assert model.kept["log"].extra == 1
    assert model.kept["counter"].calls == 0


def test_a_model_that_holds_a_trainer_and_its_data_is_not_searched():
    model = _Reversing()
    model.kept.latest = SimpleNamespace(data=[{"text": str(i)} for i in range(20_000)])
    objects = Objects(model.named_modules())
    model.kept.calls = 1
    assert objects.state() is None
    assert not objects.tensors


def test_what_a_hook_notes_for_others_stays():
    model, seen = _Reversing(), []
    model.register_forward_hook(lambda *_: seen.append(1))
    set_gradient(model, _groups(), Objective(_loss), retain=0)
    assert len(seen) == 9


def test_unregistered_tensors_are_put_back_after_a_job():
    class Hidden(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(5, 3)
            self.hidden = [nn.BatchNorm1d(3), SimpleNamespace(sum=torch.zeros(3))]
            self.to(DEVICE, torch.float64)
            self.hidden[0].to(DEVICE, torch.float64)

        def forward(self, x: Tensor) -> Tensor:
            norm, kept = self.hidden
            z = norm(self.linear(x))
            kept.sum += z.detach().cpu().mean(0)
            return z  # type: ignore[no-any-return]

    model = Hidden()
    norm, kept = model.hidden
    assert isinstance(norm, nn.BatchNorm1d)
    set_gradient(model, [Group("z", [_groups()[0].shards[1]])], Objective(_loss), mode="train")
    assert norm.weight.grad is None
    assert norm.running_mean is not None
    assert norm.running_mean.abs().max() == 0
    assert kept.sum.abs().max() == 0
