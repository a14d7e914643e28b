"""Models whose gradients, and not their outputs, depend on numbers that they keep as attributes."""

from __future__ import annotations

import enum
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from gradbox_engine import (
    CoupledShards,
    FirstOutputs,
    Group,
    Objective,
    ReplayMismatch,
    gradient_at_cotangents,
    mixed_gradient,
    set_gradient,
    set_outputs,
)
from gradbox_engine.per_sample import jacobian
from tests.device import DEVICE
from tests.engine.drawn_modules import Reversed
from tests.engine.per_sample import naive as rows
from tests.engine.ranges.running import even, set_gradient_in_ranges
from tests.engine.replay.inside_attributes import Irrep
from tests.oracle import TOLERANCE, difference


class _Counting(nn.Module):
    """Reverses its gradient the more, the more often it was called."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(5, 3)
        self.begin()
        self.to(DEVICE, torch.float64)

    def begin(self) -> None:
        self.calls = 0

    def counted(self) -> int:
        self.calls += 1
        return self.calls

    def forward(self, x: Tensor) -> Tensor:
        return Reversed.apply(self.linear(x), 0.5 * self.counted()).tanh()


class _InDict(_Counting):
    def begin(self) -> None:
        self.state = {"calls": 0, "phase": "first"}

    def counted(self) -> int:
        self.state["calls"] += 1  # type: ignore[operator]
        return self.state["calls"]  # type: ignore[return-value]


class _InDeque(_Counting):
    def begin(self) -> None:
        self.sizes: deque[int] = deque([1], maxlen=2)

    def counted(self) -> int:
        self.sizes.append(sum(self.sizes))
        return self.sizes[-1]


class _InCounter(_Counting):
    def begin(self) -> None:
        self.state = Counter(before=2)

    def counted(self) -> int:
        self.state["calls"] += 1
        return self.state["calls"] + self.state["before"]


class _Late(_Counting):
    """Has no count before its first call."""

    def begin(self) -> None: ...

    def counted(self) -> int:
        self.calls = getattr(self, "calls", 0) + 1
        return self.calls


class _Gone(_Counting):
    """Takes an attribute away in its first call."""

    def begin(self) -> None:
        self.first = 3

    def counted(self) -> int:
        return self.__dict__.pop("first", 1)  # type: ignore[no-any-return]


class _ByFlag(_Counting):
    """Switches a part between training and evaluation."""

    def begin(self) -> None:
        self.part = nn.Identity()

    def counted(self) -> int:
        self.part.training = not self.part.training
        return 1 + self.part.training


class _InTurns(_Counting):
    """Ends as it began, for there are five shards."""

    def begin(self) -> None:
        self.phase = 0

    def counted(self) -> int:
        self.phase = (self.phase + 1) % 5
        return 1 + self.phase


class _Strength(enum.Enum):
    WEAK = 1
    STRONG = 3

    def other(self) -> _Strength:
        return _Strength.STRONG if self is _Strength.WEAK else _Strength.WEAK


class _ByEnumeration(_Counting):
    def begin(self) -> None:
        self.strength = _Strength.WEAK

    def counted(self) -> int:
        self.strength = self.strength.other()
        return self.strength.value


class _ByNumpysNumber(_Counting):
    def begin(self) -> None:
        self.calls = np.int64(0)


class _InFrozenObject(_Counting):
    """Keeps its count in an object that every call replaces."""

    def begin(self) -> None:
        self.state = _Frozen(0)

    def counted(self) -> int:
        self.state = replace(self.state, calls=self.state.calls + 1)
        return self.state.calls


@dataclass(frozen=True)
class _Frozen:
    calls: int


class _InRefusingTuple(_Counting):
    def begin(self) -> None:
        self.state = Irrep((Irrep((1, -1)), 0))

    def counted(self) -> int:
        self.state = Irrep((self.state[0], self.state[1] + 1))
        calls: int = self.state[1]
        return calls


class _InReplacedDict(_Counting):
    """Keeps its count in a dict that every call replaces, beside a tensor."""

    def begin(self) -> None:
        self.state = {"calls": 0}

    def forward(self, x: Tensor) -> Tensor:
        z = super().forward(x)
        self.state["latest"] = z  # type: ignore[assignment]
        return z

    def counted(self) -> int:
        self.state = {"calls": self.state["calls"] + 1}
        return self.state["calls"]


class _BesideTensor(_Counting):
    """Keeps a tensor with a graph, too."""

    def forward(self, x: Tensor) -> Tensor:
        self.latest = super().forward(x)
        return self.latest


KINDS = [
    _Counting,
    _InDict,
    _InDeque,
    _InCounter,
    _Late,
    _Gone,
    _ByFlag,
    _InTurns,
    _ByEnumeration,
    _ByNumpysNumber,
    _InFrozenObject,
    _InRefusingTuple,
    _InReplacedDict,
    _BesideTensor,
]


def _shards() -> list[dict[str, Tensor]]:
    numbers = torch.Generator().manual_seed(1)
    sizes = (2, 3, 1, 2, 1)
    return [{"x": torch.randn(n, 5, dtype=torch.float64, generator=numbers)} for n in sizes]


def _loss(z: Tensor) -> Tensor:
    return z.sum(0).square().sum()


def _loss_of_some(z: Tensor) -> Tensor:
    """Of the second and the fourth of five shards alone."""
    return _loss(torch.cat([z[2:5], z[6:8]]))


def _expected(kind: type[_Counting], loss: Callable[[Tensor], Tensor] = _loss) -> dict[str, Tensor]:
    model = kind().train()
    loss(torch.cat([model(**shard) for shard in _shards()])).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def _attributes(model: nn.Module) -> str:
    return repr([(n, {**vars(m), "_modules": 0}) for n, m in model.named_modules()])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("retain", [0, 10**9])
def test_a_replay_finds_the_attributes_of_the_first_pass(kind, retain):
    model = kind()
    before = _attributes(model)
    found = set_gradient(
        model, [Group("z", _shards())], Objective(_loss), mode="train", retain=retain
    )
    assert difference(found.grads, _expected(kind)) <= TOLERANCE
    assert _attributes(model) == before


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("retain", [0, 1000, 10**9])
@pytest.mark.parametrize("loss", [_loss, _loss_of_some])
def test_shards_that_need_no_replay_leave_their_attributes_all_the_same(kind, retain, loss):
    found = set_gradient(
        kind(), [Group("z", _shards())], Objective(loss), mode="train", retain=retain
    )
    assert difference(found.grads, _expected(kind, loss)) <= TOLERANCE


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("retain", [0, 1000, 10**9])
def test_the_second_half_does_in_another_job(kind, retain):
    model, groups = kind(), [Group("z", _shards())]
    first = set_outputs(model, groups, mode="train", retain=retain)
    z = first.outputs["z"]
    assert isinstance(z, Tensor)
    z = z.clone().requires_grad_()
    (cotangent,) = torch.autograd.grad(_loss(z), z)
    given = first.kept or FirstOutputs({"z": {"": z.detach()}}, first.rows, first.stateful)
    found = gradient_at_cotangents(model, groups, {"z": {"": cotangent}}, given, mode="train")
    assert difference(found.grads, _expected(kind)) <= TOLERANCE


def test_a_count_beside_a_cached_tensor_keeps_every_graph():
    found = set_outputs(_BesideTensor(), [Group("z", _shards())], mode="train", retain=10**9)
    assert found.retained == 5


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_those_of_the_first_call(kind):
    expected = rows.flat(rows.jacobian(kind().train(), _shards()[1]))
    model = kind()
    for _ in range(2):
        found = jacobian(model, _shards()[1:2], mode="train")
        assert rows.difference(rows.flat(found.arrays), expected) <= rows.TOLERANCE


def test_the_tangent_pass_of_a_mixed_gradient_finds_them():
    def found(model: nn.Module, y: Tensor) -> Tensor:
        z = [shard["x"].clone().requires_grad_() for shard in _shards()]
        dfdz = [torch.autograd.grad((model(x) ** 2 @ y).sum(), x, create_graph=True)[0] for x in z]
        (gradient,) = torch.autograd.grad(torch.cat(dfdz).pow(2).sum(), y)
        return gradient

    y = torch.linspace(-1, 1, 3, dtype=torch.float64).requires_grad_()
    result = mixed_gradient(
        _Counting(),
        Group("z", _shards()),
        Objective(lambda y, v: (v**2 @ y).sum(), {"y": y}, {"y": y}),
        Objective(lambda dfdz: dfdz.pow(2).sum()),
        mode="train",
    )
    expected = found(_Counting().train(), y)
    assert difference(result.grads, {"y": expected}) <= TOLERANCE


@pytest.mark.parametrize("kind", KINDS)
def test_shards_that_change_them_are_not_split(kind):
    groups = [Group("z", _shards())]
    names = r"attribute '(calls|state|sizes|phase|strength|first|part.training)'|objects that hold"
    with pytest.raises(CoupledShards, match=names):
        set_gradient_in_ranges(kind(), even(groups, 2), groups, Objective(_loss), mode="train")


class _Remembering(_Counting):
    """Adds its output on the shard before, which no copy of the attributes keeps."""

    def begin(self) -> None:
        self.before = torch.zeros(3)

    def forward(self, x: Tensor) -> Tensor:
        z = self.linear(x) + self.before.to(x)
        self.before = z.detach().mean(0)
        return z


@pytest.mark.parametrize("retain", [0, 10**9])
def test_nor_are_those_that_read_a_tensor_of_the_shard_before(retain):
    groups = [Group("z", _shards())]
    with pytest.raises((CoupledShards, ReplayMismatch)):
        set_gradient_in_ranges(
            _Remembering(), even(groups, 2), groups, Objective(_loss), retain=retain
        )
    found = set_gradient(_Remembering(), groups, Objective(_loss))
    assert difference(found.grads, _expected(_Remembering)) <= TOLERANCE
