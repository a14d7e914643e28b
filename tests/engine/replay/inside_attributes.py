"""Models that count inside an attribute: in an object, a container, an array, a generator."""

from __future__ import annotations

import enum
import functools
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tests.engine.replay.reversing import Counter, Reversing


class _ByDefault(Reversing):
    """In an object that has no attributes when the job begins, but one of its class."""

    def begin(self) -> Any:
        class Counter:
            calls = 0

        return Counter()

    def strength(self) -> float:
        self.kept.calls += 1
        return float(self.kept.calls)


class _Weak:
    strength = 1.0


class _Strong:
    strength = 3.0


class _InClass(Reversing):
    """In the class of an object that has no attributes."""

    def begin(self) -> Any:
        return _Weak()

    def strength(self) -> float:
        self.kept.__class__ = _Strong if isinstance(self.kept, _Weak) else _Weak
        return float(self.kept.strength)


class _InNamespace(Reversing):
    def begin(self) -> Any:
        return SimpleNamespace(counter=SimpleNamespace(calls=0))

    def strength(self) -> float:
        self.kept.counter.calls += 1
        return float(self.kept.counter.calls)


@dataclass(slots=True)
class _Slotted:
    calls: int = 0
    latest: list[int] = field(default_factory=list)


class _InSlots(Reversing):
    def begin(self) -> Any:
        return _Slotted()

    def strength(self) -> float:
        self.kept.calls += 1
        self.kept.latest.append(self.kept.calls)
        return float(sum(self.kept.latest))


class _InDictInDict(Reversing):
    def begin(self) -> Any:
        return {"counts": {"calls": 0}}

    def strength(self) -> float:
        self.kept["counts"]["calls"] += 1
        return float(self.kept["counts"]["calls"])


class _InListInTuple(Reversing):
    def begin(self) -> Any:
        return ([1], "calls")

    def strength(self) -> float:
        self.kept[0].append(len(self.kept[0]))
        return float(sum(self.kept[0]))


class Irrep(tuple[Any, ...]):
    """Refuses what tuples do, as e3nn's representations of a group."""

    def __len__(self) -> int:
        raise NotImplementedError

    def __iter__(self) -> Iterator[Any]:
        raise NotImplementedError


class _InRefusingTuple(Reversing):
    def begin(self) -> Any:
        return Irrep((Counter(), Irrep((1, -1))))

    def strength(self) -> float:
        return float(self.kept[0].next())


class _InArray(Reversing):
    def begin(self) -> Any:
        return np.zeros((2, 3))

    def strength(self) -> float:
        self.kept[1, 2] += 1
        return float(self.kept.sum())


class _InTensor(Reversing):
    """A tensor that is a plain attribute, as `.to()` does not find it."""

    def begin(self) -> Any:
        return torch.zeros(2)

    def strength(self) -> float:
        self.kept[1] += 1
        return float(self.kept.sum())


class _InTensorBehindItsBack(Reversing):
    def begin(self) -> Any:
        return {"calls": torch.zeros((), dtype=torch.int64)}

    def strength(self) -> float:
        self.kept["calls"].data += 1
        return float(self.kept["calls"])


class _InSizeOfTensor(Reversing):
    def begin(self) -> Any:
        return {"calls": torch.zeros(1)}

    def strength(self) -> float:
        self.kept["calls"].resize_(len(self.kept["calls"]) + 1)
        return float(len(self.kept["calls"]))


class _InFlagOfTensor(Reversing):
    def begin(self) -> Any:
        return torch.zeros(1)

    def strength(self) -> float:
        self.kept.requires_grad_(not self.kept.requires_grad)
        return 1.0 + 2 * self.kept.requires_grad


class _InLargeTensor(Reversing):
    """Too large for n snapshots."""

    def begin(self) -> Any:
        return SimpleNamespace(moved=torch.zeros(20_000))

    def strength(self) -> float:
        self.kept.moved += 1
        return float(self.kept.moved[0])


class _InUnregisteredModule(Reversing):
    def begin(self) -> Any:
        module = nn.Identity()
        module.calls = 0  # type: ignore[assignment]
        return [module]

    def strength(self) -> float:
        self.kept[0].calls += 1
        return float(self.kept[0].calls)


class _BehindBoundMethod(Reversing):
    def begin(self) -> Any:
        return functools.partial(Counter().next)

    def strength(self) -> float:
        return float(self.kept())


class _InObjectMadeAnew(Reversing):
    def strength(self) -> float:
        before = self.kept.latest
        self.kept.latest = SimpleNamespace(calls=[before.calls[0] + 1 if before else 1])
        return float(self.kept.latest.calls[0])


class _Phase(enum.Enum):
    WEAK = 1
    STRONG = 3


class _InEnumeration(Reversing):
    def begin(self) -> Any:
        return SimpleNamespace(phase=_Phase.WEAK)

    def strength(self) -> float:
        is_weak = self.kept.phase is _Phase.WEAK
        self.kept.phase = _Phase.STRONG if is_weak else _Phase.WEAK
        return float(self.kept.phase.value)


class _TorchsGenerator(Reversing):
    def begin(self) -> Any:
        return torch.Generator().manual_seed(3)

    def strength(self) -> float:
        return float(torch.rand((), generator=self.kept))


class _NumpysGenerator(Reversing):
    def begin(self) -> Any:
        return np.random.default_rng(3)

    def strength(self) -> float:
        return float(self.kept.random())


class _NumpysRandomState(Reversing):
    def begin(self) -> Any:
        return np.random.RandomState(3)

    def strength(self) -> float:
        return float(self.kept.normal()) ** 2


class _PythonsGenerator(Reversing):
    def begin(self) -> Any:
        return {"draw": random.Random(3)}

    def strength(self) -> float:
        return self.kept["draw"].random()


class _BesideTensor(Reversing):
    """Keeps a tensor with a graph in the same object."""

    def forward(self, x: Tensor) -> Tensor:
        self.kept.latest = super().forward(x)
        return self.kept.latest  # type: ignore[no-any-return]


KEPT = [
    Reversing,
    _ByDefault,
    _InClass,
    _InNamespace,
    _InSlots,
    _InDictInDict,
    _InListInTuple,
    _InRefusingTuple,
    _InArray,
    _InTensor,
    _InTensorBehindItsBack,
    _InSizeOfTensor,
    _InFlagOfTensor,
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
