"""Models that change in each call, and whose gradients depend on it: one table of all of them.

Most reverse their gradient by a strength that depends on what they keep, so that no output shows
whether a replay finds the state that the first pass found. Each entry of STATEFUL builds a model as
it is registered; `naive_answer` has all graphs alive.
"""

from __future__ import annotations

import enum
import functools
import random
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn

from gradbox_engine import Group
from tests.device import DEVICE
from tests.engine.drawn_modules import Reversed


@dataclass(frozen=True)
class StatefulModel:
    """How to build one of them, and what the engine can do with it."""

    model: Callable[[], nn.Module]
    coupled: str | None = "attribute 'kept"
    """What the refusal to split its shards names; None where each range begins as registered."""
    in_order: bool = False
    """Whether a second pass takes all shards, in order, for no state has what each leaves."""
    checkpointed: bool = False
    """Whether a killed job goes on: shards change numbers of buffers alone; others begin again."""
    couples_samples: bool = False
    """Whether a sample's output depends on others in its shard."""


zeros, ones = (
    functools.partial(make, dtype=torch.float64, device=DEVICE)
    for make in (torch.zeros, torch.ones)
)


def linear(width: int = 3) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(5, width, dtype=torch.float64, device=DEVICE)


class Reversing(nn.Module):
    """Reverses its gradient by a strength that depends on what it keeps."""

    def __init__(self, strength: Callable[[Any, Tensor], float], **attributes: Any) -> None:
        super().__init__()
        self.linear, self.strength = linear(), strength
        for name, make in attributes.items():
            setattr(self, name, make())

    def forward(self, x: Tensor) -> Tensor:
        z = self.linear(x)
        return Reversed.apply(z, 0.5 * float(self.strength(self, z))).tanh()


class Shifting(nn.Module):
    """Shifts its outputs by what it keeps in buffers."""

    def __init__(self, shift: Callable[[Any, Tensor], Tensor], **buffers: Any) -> None:
        super().__init__()
        self.linear, self.shift = linear(), shift
        for name, make in buffers.items():
            self.register_buffer(name, make())

    def forward(self, x: Tensor) -> Tensor:
        z = self.linear(x)
        return z + self.shift(self, z.detach())


def _by(strength: Callable[[Any, Tensor], float], **told: Any) -> StatefulModel:
    """Return a model that reverses; `told` has facts, and what makes its attributes."""
    facts = {name: told.pop(name) for name in StatefulModel.__annotations__ if name in told}
    return StatefulModel(functools.partial(Reversing, strength, **told), **facts)


def _shifted(shift: Callable[[Any, Tensor], Tensor], **told: Any) -> StatefulModel:
    """Return a model that shifts; `told` has facts, and what makes its buffers."""
    facts = {name: told.pop(name) for name in StatefulModel.__annotations__ if name in told}
    facts = {"coupled": "buffer", "couples_samples": True} | facts
    return StatefulModel(functools.partial(Shifting, shift, **told), **facts)


def _in_order(model: StatefulModel) -> StatefulModel:
    return replace(model, coupled="objects that hold", in_order=True)


def _bound(holder: Any, value: Any) -> Any:
    holder.kept = value
    return value


def _counted(holder: Any) -> int:
    holder.calls += 1
    return holder.calls  # type: ignore[no-any-return]


class Calls:
    """Counts in an attribute."""

    def __init__(self) -> None:
        self.calls = 0
        self.latest: Any = None

    def next(self) -> int:
        return _counted(self)


class _Weak:
    calls, strength = 0, 1.0


class _Strong:
    strength = 3.0


class _Strength(enum.Enum):
    WEAK = 1
    STRONG = 3

    def other(self) -> _Strength:
        return _Strength.STRONG if self is _Strength.WEAK else _Strength.WEAK


@dataclass(frozen=True)
class _Frozen:
    calls: int = 0


@dataclass(slots=True)
class _Slotted:
    calls: int = 0
    seen: list[int] = field(default_factory=list)


class _Irrep(tuple[Any, ...]):
    """Refuses what tuples do, as e3nn's representations of a group."""

    def __len__(self) -> int:
        raise NotImplementedError

    def __iter__(self) -> Iterator[Any]:
        raise NotImplementedError


def _other_mode(m: Any, _: Tensor) -> float:
    m.part.training = not m.part.training
    return 1 + m.part.training


def _other_function(m: Any, _: Tensor) -> float:
    m.one, m.other = m.other, m.one
    return m.one(1, 3)  # type: ignore[no-any-return]


IN_ATTRIBUTES: Final = {
    "number": _by(lambda m, _: _bound(m, m.kept + 1), kept=lambda: 0),
    "late number": _by(lambda m, _: _bound(m, getattr(m, "kept", 0) + 1)),
    "number that goes": _by(lambda m, _: m.__dict__.pop("kept", 1), kept=lambda: 3),
    # It ends as it began, for there are five shards.
    "number in turns": _by(lambda m, _: 1 + _bound(m, (m.kept + 1) % 5), kept=lambda: 0),
    "infinity in turns": _by(
        lambda m, _: min(3.0, _bound(m, 1.0 if m.kept == float("inf") else float("inf"))),
        kept=lambda: 1.0,
    ),
    "number of NumPy": _by(lambda m, _: _bound(m, m.kept + 1), kept=lambda: np.int64(0)),
    "enumeration": _by(lambda m, _: _bound(m, m.kept.other()).value, kept=lambda: _Strength.WEAK),
    "mode of a part": _by(_other_mode, part=nn.Identity, coupled="attribute 'part.training'"),
    "tuple": _by(lambda m, _: _bound(m, (m.kept[0] + 1, "calls"))[0], kept=lambda: (0, "calls")),
    "refusing tuple": _by(
        lambda m, _: _bound(m, _Irrep((m.kept[0], m.kept[1] + 1)))[1],
        kept=lambda: _Irrep((_Irrep((1, -1)), 0)),
    ),
    "frozen object": _by(
        lambda m, _: _bound(m, replace(m.kept, calls=m.kept.calls + 1)).calls, kept=_Frozen
    ),
}


def _counted_at(mapping: Any, key: Any) -> float:
    mapping[key] = mapping.get(key, 0) + 1
    return mapping[key]  # type: ignore[no-any-return]


def _summed_in_deque(m: Any, _: Tensor) -> float:
    m.kept.append(sum(m.kept))
    return 0.3 * m.kept[-1]


def _summed_in_list(m: Any, _: Tensor) -> float:
    m.kept[0].append(len(m.kept[0]))
    return sum(m.kept[0])


def _summed_in_slots(m: Any, _: Tensor) -> float:
    m.kept.seen.append(_counted(m.kept))
    return sum(m.kept.seen)


def _shrinking(m: Any, _: Tensor) -> float:
    m.kept.pop()
    return len(m.kept)


def _made_anew(m: Any, _: Tensor) -> float:
    before = m.kept.latest
    m.kept.latest = SimpleNamespace(calls=[before.calls[0] + 1 if before else 1])
    return m.kept.latest.calls[0]  # type: ignore[no-any-return]


def _other_class(m: Any, _: Tensor) -> float:
    m.kept.__class__ = _Strong if isinstance(m.kept, _Weak) else _Weak
    return m.kept.strength  # type: ignore[no-any-return]


def _unregistered_module() -> list[Any]:
    module: Any = nn.Identity()
    module.calls = 0
    return [module]


IN_CONTAINERS_AND_OBJECTS: Final = {
    "dict": _by(
        lambda m, _: _counted_at(m.kept, "calls"), kept=lambda: {"calls": 0, "phase": "first"}
    ),
    "whole number as a key": _by(lambda m, _: _counted_at(m.kept, 7), kept=dict),
    "dict in a dict": _by(
        lambda m, _: _counted_at(m.kept["counts"], "calls"), kept=lambda: {"counts": {"calls": 0}}
    ),
    "deque": _by(_summed_in_deque, kept=lambda: deque([1], maxlen=2)),
    "set": _by(lambda m, _: m.kept.add(len(m.kept)) or len(m.kept), kept=set),
    "counter": _by(
        lambda m, _: _counted_at(m.kept, "calls") + m.kept["before"] + m.kept["others"],
        kept=lambda: Counter(before=2),
    ),
    "list in a tuple": _by(_summed_in_list, kept=lambda: ([1], "calls")),
    "object": _by(lambda m, _: m.kept.next(), kept=Calls),
    "object in a refusing tuple": _by(
        lambda m, _: m.kept[0].next(), kept=lambda: _Irrep((Calls(), _Irrep((1, -1))))
    ),
    "object in an object": _by(
        lambda m, _: _counted(m.kept.counter),
        kept=lambda: SimpleNamespace(counter=SimpleNamespace(calls=0)),
    ),
    "object behind its method": _by(
        lambda m, _: m.kept(), kept=lambda: functools.partial(Calls().next)
    ),
    "object that begins with its class's number": _by(lambda m, _: _counted(m.kept), kept=_Weak),
    "object with slots": _by(_summed_in_slots, kept=_Slotted),
    "object made anew": _by(_made_anew, kept=Calls),
    "object's class": _by(_other_class, kept=_Weak, coupled="classes"),
    "object's enumeration": _by(
        lambda m, _: _bound(m.kept, m.kept.kept.other()).value,
        kept=lambda: SimpleNamespace(kept=_Strength.WEAK),
    ),
    "unregistered module": _by(lambda m, _: _counted(m.kept[0]), kept=_unregistered_module),
}


def _in_array(m: Any, _: Tensor) -> float:
    m.kept[1, 2] += 1
    return m.kept.sum()  # type: ignore[no-any-return]


def _by_data(m: Any, _: Tensor) -> float:
    m.kept["calls"].data += 1
    return float(m.kept["calls"])


def _by_flag(m: Any, _: Tensor) -> float:
    m.kept.requires_grad_(not m.kept.requires_grad)
    return 1.0 + 2 * m.kept.requires_grad


IN_ARRAYS_AND_GENERATORS: Final = {
    "array": _by(_in_array, kept=lambda: np.zeros((2, 3))),
    "tensor": _by(lambda m, _: m.kept.add_(1).sum(), kept=lambda: torch.zeros(2)),
    "tensor by .data": _by(_by_data, kept=lambda: {"calls": torch.zeros((), dtype=torch.int64)}),
    "tensor's size": _by(
        lambda m, _: len(m.kept["calls"].resize_(len(m.kept["calls"]) + 1)),
        kept=lambda: {"calls": torch.zeros(1)},
    ),
    "tensor's flag": _by(_by_flag, kept=lambda: torch.zeros(1)),
    "torch's generator": _by(
        lambda m, _: torch.rand((), generator=m.kept),
        kept=lambda: torch.Generator().manual_seed(3),
    ),
    "NumPy's generator": _by(lambda m, _: m.kept.random(), kept=lambda: np.random.default_rng(3)),
    "NumPy's older generator": _by(
        lambda m, _: m.kept.normal() ** 2, kept=lambda: np.random.RandomState(3)
    ),
    "Python's generator": _by(
        lambda m, _: m.kept["draw"].random(), kept=lambda: {"draw": random.Random(3)}
    ),
}


def _beside_tensor(m: Any, z: Tensor) -> float:
    m.latest = z
    return _bound(m, m.kept + 1)  # type: ignore[no-any-return]


def _object_beside_tensor(m: Any, z: Tensor) -> float:
    m.kept.latest = z
    return m.kept.next()  # type: ignore[no-any-return]


def _length(holder: Any, z: Tensor) -> float:
    holder.kept.append(z)
    return len(holder.kept)


def _length_of_dict(m: Any, z: Tensor) -> float:
    m.kept[f"call {len(m.kept)}"] = z.detach()
    return len(m.kept)


class _Halving(nn.Module):
    """Halves a tensor unseen, scales by it, and binds its name to another one for the next call."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.kept = linear(), ones(3)

    def forward(self, x: Tensor) -> Tensor:
        self.kept.data.mul_(0.5)
        z = self.linear(x) * self.kept
        self.kept = self.kept + z.detach().mean(0)
        return z


class _HalvingAView(_Halving):
    """Does so through a view of the tensor that it made with it, in a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.part = (self.kept[:2], None)

    def forward(self, x: Tensor) -> Tensor:
        self.part[0].data.mul_(0.5)
        z = super().forward(x)
        self.part = (self.kept[:2], None)
        return z


def _late_average(m: Any, z: Tensor) -> float:
    mean, before = z.detach().abs().mean(), m.kept["mean"]
    m.kept["mean"] = mean if before is None else 0.5 * before + mean
    return float(m.kept["mean"])


def _first_call(m: Any, z: Tensor) -> float:
    is_first, m.kept = m.kept is None, z
    return 1 if is_first else 2


def _cached_once(holder: Any, z: Tensor) -> float:
    if holder.kept is None:
        holder.kept = z.detach().abs().mean()
    return float(holder.kept)


def _the_like(m: Any, z: Tensor) -> float:
    is_first = m.kept.latest is None
    m.kept.latest, m.latest, m.mask = (z, None), z, ones(3)
    return 1 if is_first else 2


CACHING: Final = {
    "exchanged functions": _by(
        _other_function, one=lambda: min, other=lambda: max, coupled="attribute 'one'"
    ),
    "list that shrinks": _by(_shrinking, kept=lambda: [torch.zeros(1) for _ in range(9)]),
    "number beside a tensor": _by(_beside_tensor, kept=lambda: 0),
    "object beside a tensor": _by(_object_beside_tensor, kept=Calls),
    "new dict beside a tensor": _in_order(
        _by(
            lambda m, z: _bound(m, {"calls": m.kept["calls"] + 1, "latest": z})["calls"],
            kept=lambda: {"calls": 0},
        )
    ),
    "length": _in_order(_by(_length, kept=list)),
    "length of a deque": _in_order(_by(_length, kept=lambda: deque(maxlen=3))),
    "length of a dict": _by(_length_of_dict, kept=dict),
    "length in an object": _in_order(
        _by(lambda m, z: _length(m.kept, z), kept=lambda: SimpleNamespace(kept=[]))
    ),
    "length in a new object": _in_order(
        _by(
            lambda m, z: len(_bound(m, SimpleNamespace(seen=[*m.kept.seen, z])).seen),
            kept=lambda: SimpleNamespace(seen=[]),
        )
    ),
    "output before, in turns": _in_order(
        _by(
            lambda m, z: 3 - 2 * (_bound(m, None if m.kept is not None else z) is None),
            kept=lambda: None,
        )
    ),
    "tensor too large for n states": _in_order(
        _by(
            lambda m, _: m.kept.moved.add_(1)[0],
            kept=lambda: SimpleNamespace(moved=torch.zeros(20_000)),
        )
    ),
    "average": _by(
        lambda m, z: _bound(m, 0.5 * m.kept + z.detach().abs().mean()), kept=lambda: zeros(())
    ),
    "late average": _by(_late_average, kept=lambda: {"mean": None}),
    "first call": _by(_first_call, kept=lambda: None, coupled=None),
    "cached once": _by(_cached_once, kept=lambda: None),
    "cached once in an object": _by(
        lambda m, z: _cached_once(m.kept, z), kept=lambda: SimpleNamespace(kept=None)
    ),
    "the like in every call": _by(
        _the_like, mask=lambda: ones(3), kept=lambda: SimpleNamespace(latest=None), coupled=None
    ),
}


def _trading(m: Any, z: Tensor) -> Tensor:
    m.a, m.b = m.b, m.a
    m.a.mul_(0.5).add_(z.mean(0))
    return m.a - 2 * m.b  # type: ignore[no-any-return]


def _turned(m: Any, z: Tensor) -> Tensor:
    """It changes its values with each call, and with every second its shape in place."""
    shift = m.table[0, :2].repeat(2)[:3]
    m.calls += 1
    table = 0.5 * m.table + z.mean()
    m.table.data = table.t() if m.calls % 2 == 0 else table
    return shift  # type: ignore[no-any-return]


def _growing(m: Any, z: Tensor) -> Tensor:
    m.queue = torch.cat([m.queue, z.mean(0, keepdim=True)])
    return m.queue.sum(0)  # type: ignore[no-any-return]


def _late(m: Any, z: Tensor) -> Tensor:
    """It registers a buffer in its first call, and fills one that was None."""
    if not hasattr(m, "calls"):
        m.register_buffer("calls", torch.zeros((), dtype=torch.int64, device=DEVICE))
    m.calls += 1
    m.sum = z.mean(0) if m.sum is None else m.sum + z.mean(0)
    return m.sum / m.calls  # type: ignore[no-any-return]


def _with_holes(m: Any, z: Tensor) -> Tensor:
    m.known[m.place % 4] = z.mean(0)
    m.place += 1
    return m.known.nan_to_num().sum(0)  # type: ignore[no-any-return]


def _averaging(m: Any, z: Tensor) -> Tensor:
    m.plain[0].mul_(0.5).add_(z.mean(0))
    return sum(buffer.view(-1, 3).sum(0) for buffer in m.buffers())


def _shared() -> nn.Module:
    """Build one buffer under two names, and a plain attribute that is the same tensor."""
    model: Any = Shifting(_averaging, mean=lambda: zeros(3))
    model.inner, model.plain = nn.Module(), [model.mean]
    model.inner.register_buffer("mean", model.mean)
    return model  # type: ignore[no-any-return]


def _by_view() -> nn.Module:
    """Build one that writes to its buffer through a view that was made long ago."""
    model: Any = Shifting(_averaging, both=lambda: zeros(2, 3))
    model.plain = [model.both[0]]
    return model  # type: ignore[no-any-return]


class Spiking(nn.Module):
    """Keeps its state in a buffer from step to step, as spiking layers do."""

    state: Tensor

    def __init__(self, start: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.start = linear(), start
        self.register_buffer("state", zeros(1, 3))

    def forward(self, x: Tensor) -> Tensor:
        self.state = self.start(self.state)
        for _ in range(3):
            self.state = 0.7 * self.state + self.linear(x)
        return self.state.tanh()


STARTS: Final[dict[str, Callable[[Tensor], Tensor]]] = {
    "anew": lambda state: zeros(1, 3),
    "detached": lambda state: state.detach().mean(0, keepdim=True),
    "detached in place": lambda state: state.detach_().mean(0, keepdim=True),
}
IN_BUFFERS: Final = {
    "buffers that trade places": _shifted(_trading, a=lambda: zeros(3), b=lambda: ones(3)),
    "buffer turned": _shifted(
        _turned,
        table=lambda: zeros(6).copy_(torch.arange(6)).view(2, 3),
        calls=lambda: zeros(()),
        couples_samples=False,
        checkpointed=True,
    ),
    "buffer that grows": _shifted(_growing, queue=lambda: zeros(1, 3)),
    "late buffers": _shifted(_late, sum=lambda: None),
    "buffer with NaN for nothing yet": _shifted(
        _with_holes,
        known=lambda: zeros(4, 3) + torch.nan,
        place=lambda: zeros(()).long(),
        checkpointed=True,
    ),
    "shared buffer": StatefulModel(_shared, "buffer", couples_samples=True, checkpointed=True),
    "buffer by a view": StatefulModel(_by_view, "attribute 'plain", couples_samples=True),
    "buffer told to require grad": _shifted(
        lambda m, _: 2 * m.zero.requires_grad_(),
        zero=lambda: zeros(()),
        coupled=None,
        couples_samples=False,
        checkpointed=True,
    ),
    **{
        f"graph in a buffer that begins {name}": StatefulModel(
            functools.partial(Spiking, start), "buffer"
        )
        for name, start in STARTS.items()
    },
}


class _Remembering(nn.Module):
    """Adds the mean of the shard before, which no output but this one shows."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.kept = linear(), zeros(3)

    def forward(self, x: Tensor) -> Tensor:
        z = self.linear(x) + self.kept
        self.kept = z.detach().mean(0)
        return z


class _Submodules(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = linear(), linear()

    def forward(self, x: Tensor) -> Tensor:
        self.one, self.other = self.other, self.one
        return self.one(x).tanh()


class _InList(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([linear(), linear(), linear()])

    def forward(self, x: Tensor) -> Tensor:
        self.layers.append(self.layers.pop(0))
        return self.layers[0](x).tanh()


class _Parameters(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.one, self.other = linear(), nn.Parameter(ones(3)), nn.Parameter(ones(3))

    def forward(self, x: Tensor) -> Tensor:
        self.one, self.other = self.other, self.one
        return (self.linear(x) * self.one).tanh()


class _ParametersInList(_Parameters):
    def __init__(self) -> None:
        super().__init__()
        self.pair = [self.one, self.other]

    def forward(self, x: Tensor) -> Tensor:
        self.pair.reverse()
        return (self.linear(x) * self.pair[0]).tanh()


class _Half(nn.Module):
    """The identity, with half its gradient."""

    def forward(self, h: Tensor) -> Tensor:
        return 0.5 * (h + h.detach())


class _Classes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.switched = linear(), nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        is_half = isinstance(self.switched, _Half)
        self.switched.__class__ = nn.Identity if is_half else _Half
        return self.switched(self.linear(x)).tanh()


class _Collecting(nn.Module):
    """Returns its layers' outputs, which the hooks collect."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = linear(5), linear(5)
        self.hooked = False

    def forward(self, x: Tensor) -> Tensor:
        if not self.hooked:
            for layer in (self.a, self.b):
                layer.register_forward_hook(lambda _m, _i, out: self.found.append(out))
            self.hooked = True
        self.found: list[Tensor] = []
        self.b(self.a(x).tanh())
        found = self.found
        del self.found
        return found[0] * found[1]


class _AtFirst(nn.Module):
    """Doubles its output in its first call."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = linear()

        def double(_m: nn.Module, _i: Any, out: Tensor) -> Tensor:
            handle.remove()
            return out * 2

        handle = self.linear.register_forward_hook(double)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).tanh()


REGISTERED: Final = {
    "output of the shard before": StatefulModel(_Remembering),
    "tensor halved and bound anew": StatefulModel(_Halving),
    "view halved and bound anew": StatefulModel(_HalvingAView, coupled="attribute '"),
    "exchanged submodules": StatefulModel(_Submodules, "submodules"),
    "submodules moved in a list": StatefulModel(_InList, "submodules"),
    "exchanged parameters": StatefulModel(_Parameters, "submodules"),
    "parameters exchanged in a list": StatefulModel(_ParametersInList, "attribute 'pair"),
    "submodule's class": StatefulModel(_Classes, "submodules"),
    "hooks that the first call registers": StatefulModel(_Collecting, "attribute 'hooked'"),
    "hook that removes itself": StatefulModel(_AtFirst, "hooks"),
}
STATEFUL: Final[dict[str, StatefulModel]] = {
    **IN_ATTRIBUTES,
    **IN_CONTAINERS_AND_OBJECTS,
    **IN_ARRAYS_AND_GENERATORS,
    **CACHING,
    **IN_BUFFERS,
    **REGISTERED,
}


def groups() -> list[Group]:
    """Return five shards."""
    numbers = torch.Generator().manual_seed(1)
    sizes = (2, 3, 1, 2, 1)
    shards = [torch.randn(n, 5, dtype=torch.float64, generator=numbers) for n in sizes]
    return [Group("z", [{"0": shard} for shard in shards])]


def loss(z: Tensor) -> Tensor:
    return z.sum(0).square().sum()


def loss_of_some(z: Tensor) -> Tensor:
    """Of the second and the fourth of five shards alone."""
    return loss(torch.cat([z[2:5], z[6:8]]))


@dataclass(frozen=True)
class Naive:
    """What a backward pass through all graphs finds, without parameters that no shard reaches."""

    grads: dict[str, Tensor]
    buffers: dict[str, Tensor]


def naive_answer(
    model: Callable[[], nn.Module],
    of: Callable[[Tensor], Tensor] = loss,
    anew: Sequence[int] = (),
) -> Naive:
    """Return the gradients with all graphs alive, and the buffers after all shards.

    Args:
        anew: before which shards another model begins as registered, whose gradients are added.
    """
    built, zs = [model().train()], []
    named = [dict(built[0].named_parameters())]  # before some exchange theirs
    for index, shard in enumerate(groups()[0].shards):
        if index in anew:
            built.append(model().train())
            named.append(dict(built[-1].named_parameters()))
        zs.append(built[-1](shard["0"].to(DEVICE)))
    of(torch.cat(zs)).backward()
    grads: dict[str, Tensor] = {}
    for name, parameter in (item for one in named for item in one.items()):
        if parameter.grad is not None:
            grads[name] = grads.get(name, 0) + parameter.grad
    buffers = {name: buffer.detach().clone() for name, buffer in built[-1].named_buffers()}
    return Naive(grads, buffers)
