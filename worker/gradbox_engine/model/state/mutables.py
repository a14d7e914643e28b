"""What can change inside without being bound anew, and what was in it at one moment.

Entries of a container, attributes of an object, a NumPy array, a random generator, a tensor that is
registered nowhere.
"""

from __future__ import annotations

import enum
import functools
import random
import sys
from collections.abc import Callable, Iterable
from operator import is_
from types import MemberDescriptorType, MethodType, SimpleNamespace
from typing import Any, Final, Protocol

import torch
from torch import Tensor, nn

from gradbox_engine.model.state.containers import (
    CONTAINERS,
    MOST_ENTRIES,
    VALUES,
    entries_of,
    refill,
)
from gradbox_engine.model.tensor_equality import equal_numbers, form, is_plain, writable

try:
    import numpy.random  # which NumPy imports on first use
except ImportError:
    numpy = None  # type: ignore[assignment]

# Their objects have states of their own, and are left alone.
LIBRARIES: Final = frozenset(sys.stdlib_module_names) | {"torch", "numpy"}
MOST_BYTES: Final = 2**24  # of an array or a tensor
MOST_KEPT_BYTES: Final = 2**16  # of one in each of n snapshots


class Mutable(Protocol):
    """Something that can change inside, and what was in it when this was made."""

    owner: Any  # kept alive, for its id names it
    path: str

    def changed(self) -> bool:
        """Tell whether something else is in it now."""

    def restore(self) -> None:
        """Put back what was in it."""

    def new(self, registered: Mutable | None) -> list[Any] | None:
        """Return the parts that an earlier one of the same thing lacks; None if it is large."""


def mutable(path: str, value: Any) -> Mutable | None:
    """Return what is in a value now; None if nothing in it can change, or it is left alone.

    Args:
        path: how messages call it.
    """
    if isinstance(value, CONTAINERS):
        return _Entries(path, value, of=value)
    if isinstance(value, Tensor):
        return _Numbers(path, value) if _can_be_put_back(value) else None
    if isinstance(value, random.Random):
        return _Generator(path, value, value.getstate, value.setstate)
    if isinstance(value, torch.Generator):
        return _Generator(path, value, value.get_state, value.set_state)
    if is_array(value):
        fits = value.flags.writeable and not value.dtype.hasobject and value.nbytes <= MOST_BYTES
        return _Array(path, value) if fits else None
    if numpy is not None and isinstance(value, numpy.random.RandomState):
        read = functools.partial(value.get_state, legacy=False)
        return _Generator(path, value, read, value.set_state)
    if numpy is not None and isinstance(value, numpy.random.Generator):
        bits = value.bit_generator
        write = functools.partial(setattr, bits, "state")
        return _Generator(path, value, lambda: bits.state, write)
    attributes = attributes_of(value)
    if attributes is None:
        return None
    return _Slots(path, value) if slots_of(value) else _Entries(path, value, of=attributes)


def attributes_of(value: Any) -> dict[str, Any] | None:
    """Return an object's attributes, the live dict if it has one; None of one left alone."""
    if isinstance(value, (type, Tensor, enum.Enum)):
        return None
    of_library = type(value).__module__.partition(".")[0] in LIBRARIES
    if of_library and not isinstance(value, (nn.Module, SimpleNamespace)):
        return None
    try:
        found: dict[str, Any] = object.__getattribute__(  # and of no proxy's object
            value, "__dict__"
        )
    except AttributeError:
        return {name: getattr(value, name) for name in slots_of(value) if hasattr(value, name)}
    return found


def slots_of(value: Any) -> list[str]:
    """Return the names of the slots of an object that has no dict, as dataclasses may be."""
    if hasattr(value, "__dict__"):
        return []
    return [
        name
        for kind in type(value).__mro__
        if "__slots__" in vars(kind)
        for name, descriptor in vars(kind).items()
        if isinstance(descriptor, MemberDescriptorType)
    ]


def _can_be_put_back(tensor: Tensor) -> bool:
    """Tell whether a tensor is small, the model's own and no parameter, and can be written to."""
    return (
        tensor.is_leaf
        and is_plain(tensor)
        and writable(tensor)
        and tensor.nbytes <= MOST_BYTES
        and not (isinstance(tensor, nn.Parameter) or tensor.is_inference() or tensor.is_meta)
    )


def is_array(value: Any) -> bool:
    """Tell whether a value is a NumPy array."""
    return numpy is not None and isinstance(value, numpy.ndarray)


def parts_of(value: Any) -> Iterable[tuple[str, Any]]:
    """Return what a value holds, and how a path to it goes on; nothing of one left alone."""
    if isinstance(value, dict):
        return ((f"[{key}]", part) for key, part in list(value.items()))
    if isinstance(value, (*CONTAINERS, tuple)):
        return (("[…]", part) for part in entries_of(value))
    if isinstance(value, functools.partial):
        return [("", value.func), ("", value.args), ("", value.keywords)]
    if isinstance(value, MethodType):
        return [("", value.__self__)]
    return ((f".{name}", part) for name, part in list((attributes_of(value) or {}).items()))


def global_generators() -> set[int]:
    """Return the ids of the generators that no model owns: they are seeded for each shard."""
    found = {id(torch.default_generator), id(getattr(random, "_inst", None))}
    if numpy is not None:
        found.add(id(getattr(numpy.random.mtrand, "_rand", None)))
    return found | set(map(id, torch.cuda.default_generators))


class _Entries:
    """A container's entries, or an object's attributes and its class."""

    def __init__(self, path: str, owner: Any, *, of: Any) -> None:
        self.path, self.owner = path, owner
        self._container, self._kind = of, type(owner)
        self._entries = entries_of(of)

    def changed(self) -> bool:
        if type(self.owner) is not self._kind:
            return True
        now, before = entries_of(self._container), self._entries
        if len(now) != len(before):
            return True
        return not (all(map(is_, now, before)) or all(map(_same, now, before)))

    def restore(self) -> None:
        refill(self._container, self._entries)
        if type(self.owner) is not self._kind:
            object.__setattr__(self.owner, "__class__", self._kind)

    def new(self, registered: Mutable | None) -> list[Any] | None:
        before = registered._parts if isinstance(registered, _Entries) else []
        known = set(map(id, before))
        found = [part for part in self._parts if id(part) not in known]
        return found if len(found) <= MOST_ENTRIES else None

    @property
    def _parts(self) -> list[Any]:
        return self._entries[1::2] if isinstance(self._container, dict) else self._entries


class _Slots:
    def __init__(self, path: str, owner: Any) -> None:
        self.path, self.owner = path, owner
        self._values = attributes_of(owner) or {}

    def changed(self) -> bool:
        now, before = attributes_of(self.owner) or {}, self._values
        return now.keys() != before.keys() or not all(_same(now[n], before[n]) for n in now)

    def restore(self) -> None:
        for name in slots_of(self.owner):
            if name in self._values:
                object.__setattr__(self.owner, name, self._values[name])
            elif hasattr(self.owner, name):
                object.__delattr__(self.owner, name)

    def new(self, registered: Mutable | None) -> list[Any] | None:
        before = registered._values.values() if isinstance(registered, _Slots) else ()
        known = set(map(id, before))
        return [value for value in self._values.values() if id(value) not in known]


class _Array:
    def __init__(self, path: str, array: Any) -> None:
        self.path, self.owner = path, array
        self._values = array.copy()

    def changed(self) -> bool:
        return bool(self.owner.tobytes() != self._values.tobytes())

    def restore(self) -> None:
        self.owner[...] = self._values

    def new(self, registered: Mutable | None) -> list[Any] | None:
        return [0] if self.owner.nbytes <= MOST_KEPT_BYTES else None


class _Numbers:
    """A tensor's, with its version counter: a graph that saved it finds the version it saved."""

    def __init__(self, path: str, tensor: Tensor) -> None:
        self.path, self.owner = path, tensor
        self._data, self._version = tensor.detach(), tensor._version
        self._values, self._requires_grad = self._data.clone(), tensor.requires_grad

    def changed(self) -> bool:
        now, before = self.owner, self._values
        if form(now) != form(before) or now.requires_grad != self._requires_grad:
            return True
        return not equal_numbers(now, before)

    @torch.no_grad()
    def restore(self) -> None:
        if self.owner.grad_fn is not None:
            self.owner.detach_()
        if form(self.owner) != form(self._values):
            self.owner.data = self._data
        if self.changed():
            self.owner.data.copy_(self._values)
            self.owner.requires_grad_(self._requires_grad)
        torch._C._autograd._unsafe_set_version_counter((self.owner,), (self._version,))

    def new(self, registered: Mutable | None) -> list[Any] | None:
        small = self.owner.nbytes <= MOST_KEPT_BYTES
        return [0] if small and self.owner.grad_fn is None else None


class _Generator:
    def __init__(
        self, path: str, owner: Any, read: Callable[[], Any], write: Callable[[Any], object]
    ) -> None:
        self.path, self.owner = path, owner
        self._read, self._write = read, write
        self._state = read()

    def changed(self) -> bool:
        return not _same_state(self._read(), self._state)

    def restore(self) -> None:
        self._write(self._state)

    def new(self, registered: Mutable | None) -> list[Any] | None:
        return [0]


def _same(a: Any, b: Any) -> bool:
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    return bool(a == b) if isinstance(a, VALUES) else isinstance(a, CONTAINERS) and not (a or b)


def _same_state(a: Any, b: Any) -> bool:
    """Tell whether two states of a random generator are equal."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_same_state(a[key], b[key]) for key in a)
    if isinstance(a, Tensor):
        return torch.equal(a, b)
    return a.tobytes() == b.tobytes() if hasattr(a, "tobytes") else bool(a == b)
