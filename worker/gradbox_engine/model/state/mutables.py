"""What can change inside without being bound anew, and what was in it at one moment.

Entries of a container, attributes and class of an object, the numbers of a NumPy array or of a
tensor that is registered nowhere, a random generator.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from operator import is_, setitem
from typing import Any, Final, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from gradbox_engine.model.state.containers import (
    CONTAINERS,
    MOST_ENTRIES,
    VALUES,
    attributes_of,
    entries_of,
    fill,
    keys_of,
    path_to,
    slots_of,
)
from gradbox_engine.model.state.outlines import Outline, beyond_kinds, outline
from gradbox_engine.model.tensor_equality import equal_numbers, form, is_plain, writable
from gradbox_engine.torch_private import set_versions, version_of

try:
    import numpy.random  # which NumPy imports on first use
except ImportError:
    numpy = None  # type: ignore[assignment]

MOST_BYTES: Final = 2**24  # of an array or a tensor
MOST_KEPT_BYTES: Final = 2**16  # of one in each of n states

LEFT_OUT: Final = object()
"""In the place of an attribute or an entry of a dict that no state keeps."""

Keepable = Callable[[Any], bool]
"""Whether a state may hold a value that came since."""


class LeftOut(NamedTuple):
    """A part that no state keeps: it stays as it is."""

    path: str
    outline: Outline
    counts: bool  # whether there are numbers or lengths in it that were not registered
    fills: bool  # whether nothing was registered in its place


class Mutable(Protocol):
    """Something that can change inside, and what was in it when this was made."""

    owner: Any  # kept alive, for its id names it
    path: str  # how messages call it

    def changed(self) -> bool:
        """Return whether something else is in it now."""

    def again(self) -> Mutable:
        """Return what is in it now."""

    def restore(self, others: Mapping[int, Tensor]) -> None:
        """Put back what was in it, but for what was left out.

        Args:
            others: what is put in the place of tensors, by their ids.
        """

    def too_much(self, registered: Mutable | None, keepable: Keepable) -> list[Any]:
        """Return what has come since and no state may hold."""

    def leave_out(self, registered: Mutable | None, parts: list[Any]) -> list[LeftOut]:
        """Let go of these parts, which are `too_much`."""

    def differing(self, registered: Mutable | None) -> list[str]:
        """Return the paths of what is not as registered and was not left out."""


def mutable(path: str, value: Any) -> Mutable | None:
    """Return what is in a value now; None if nothing in it can change, or it is left alone.

    Tensors are told apart by who asks: those that a model is registered with have `Numbers`.
    """
    if isinstance(value, CONTAINERS):
        return Entries(path, value, value)
    if isinstance(value, random.Random):
        return Whole(path, value, value.getstate, value.setstate)
    if isinstance(value, torch.Generator):
        return Whole(path, value, value.get_state, value.set_state)
    if numpy is not None and isinstance(value, numpy.ndarray):
        fits = value.flags.writeable and not value.dtype.hasobject and value.nbytes <= MOST_BYTES
        write = partial(setitem, value, ...)
        return Whole(path, value, value.copy, write, num_bytes=value.nbytes) if fits else None
    if numpy is not None and isinstance(value, numpy.random.RandomState):
        return Whole(path, value, partial(value.get_state, legacy=False), value.set_state)
    if numpy is not None and isinstance(value, numpy.random.Generator):
        bits = value.bit_generator
        return Whole(path, value, lambda: bits.state, partial(setattr, bits, "state"))
    attributes = attributes_of(value)
    if attributes is None:
        return None
    return Entries(path, value, None if slots_of(value) else attributes)


def same(a: Any, b: Any) -> bool:
    """Return whether one entry may stand for another.

    Equal values may, containers of a kind that are empty, and small tensors of equal numbers.
    """
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, Tensor):
        both_small = is_small(a) and is_small(b) and not (a.requires_grad or b.requires_grad)
        return both_small and form(a) == form(b) and equal_numbers(a, b)
    return bool(a == b) if isinstance(a, VALUES) else isinstance(a, CONTAINERS) and not (a or b)


def _unchanged(now: Any, before: Any) -> bool:
    """Return whether an entry need not be put back; another tensor has to, for it may be written
    to."""
    return now is before or (not isinstance(now, Tensor) and same(now, before))


def is_small(tensor: Tensor) -> bool:
    """Return whether n states may have a tensor each: it has no graph, and few bytes."""
    return tensor.is_leaf and is_plain(tensor) and tensor.nbytes <= MOST_KEPT_BYTES


def can_be_put_back(tensor: Tensor) -> bool:
    """Return whether a tensor is the model's own and no parameter, and can be written to."""
    return (
        tensor.is_leaf
        and is_plain(tensor)
        and writable(tensor)
        and tensor.nbytes <= MOST_BYTES
        and not (isinstance(tensor, nn.Parameter) or tensor.is_inference() or tensor.is_meta)
    )


def global_generators() -> set[int]:
    """Return the ids of the generators that no model owns: they are seeded for each shard."""
    generators = {id(torch.default_generator), id(getattr(random, "_inst", None))}
    if numpy is not None:
        generators.add(id(getattr(numpy.random.mtrand, "_rand", None)))
    return generators | set(map(id, torch.cuda.default_generators))


class Entries:
    """A container's entries, or an object's attributes and its class.

    `container` is the live container or dict of attributes, None of an object with slots. `keys`
    are those of a dict or the names of attributes; a list, a set or a deque has none. `values` are
    None where a list, a set or a deque stays as it is.
    """

    def __init__(self, path: str, owner: Any, container: Any) -> None:
        self.path, self.owner, self.container = path, owner, container
        self.kind = type(owner)
        self.keys: list[Any]
        self.values: list[Any] | None
        self.keys, self.values = self._live()

    @property
    def is_container(self) -> bool:
        """Whether it is no object with attributes."""
        return self.container is self.owner

    def by_key(self) -> dict[Any, Any]:
        """Return a dict's entries, or attributes."""
        return dict(zip(self.keys, self.values or [], strict=True))

    def parts(self) -> Iterable[tuple[Any, Any]]:
        """Return the entries, each with its key, name or index."""
        values = self.values or []
        return zip(self.keys, values, strict=True) if self.keys else enumerate(values)

    def changed(self) -> bool:
        keys, now = self._live()
        before = self.values or []
        if type(self.owner) is not self.kind or keys != self.keys or len(now) != len(before):
            return True
        return not (all(map(is_, now, before)) or all(map(_unchanged, now, before)))

    def again(self) -> Entries:
        return Entries(self.path, self.owner, self.container)

    def exchange(self, others: Mapping[int, Tensor]) -> bool:
        """Hold other tensors in the place of these, by their ids; return whether any was there."""
        before = self.values or []
        after = [exchanged(value, others) for value in before]
        if all(map(is_, before, after)):
            return False
        self.values = after
        return True

    def restore(self, others: Mapping[int, Tensor]) -> None:
        if self.values is not None:
            self._fill(self.keys, [exchanged(value, others) for value in self.values])
        if type(self.owner) is not self.kind:
            object.__setattr__(self.owner, "__class__", self.kind)

    def too_much(self, registered: Mutable | None, keepable: Keepable) -> list[Any]:
        known = set(map(id, registered.values or [])) if isinstance(registered, Entries) else set()
        new = [value for value in self.values or [] if id(value) not in known]
        return new if len(new) > MOST_ENTRIES else [v for v in new if not keepable(v)]

    def leave_out(self, registered: Mutable | None, parts: list[Any]) -> list[LeftOut]:
        values, ids = self.values or [], set(map(id, parts))
        names = [name for name, v in zip(self.keys, values, strict=False) if id(v) in ids]
        known = registered if isinstance(registered, Entries) else None
        self.values = [LEFT_OUT if id(v) in ids else v for v in values] if self.keys else None
        if self.is_container:
            now = _outline(tuple(parts))
            if known is None or len(known.values or []) != len(values):
                now.append(len(values))
            return [LeftOut(self.path, now, counts=bool(beyond_kinds(now)), fills=False)]
        before, by_name = known.by_key() if known else {}, dict(zip(self.keys, values, strict=True))
        return [self._left_out(name, by_name[name], before.get(name)) for name in names]

    def differing(self, registered: Mutable | None) -> list[str]:
        if self.is_container or not isinstance(registered, Entries):
            return [] if self.values is None else [self.path]
        now, before = self.by_key(), registered.by_key()
        changed = [
            name
            for name, value in now.items()
            if value is not LEFT_OUT and not (name in before and same(value, before[name]))
        ]
        gone = [name for name in before if name not in now]
        kind = [] if self.kind is registered.kind else ["__class__"]
        return [path_to(name, self.path, self.owner) for name in (*changed, *gone, *kind)]

    def _left_out(self, name: str, value: Any, registered: Any) -> LeftOut:
        now = _outline(value)
        counts = bool(beyond_kinds(now)) and beyond_kinds(now) != beyond_kinds(_outline(registered))
        path = path_to(name, self.path, self.owner)
        return LeftOut(path, now, counts=counts, fills=registered is None)

    def _live(self) -> tuple[list[Any], list[Any]]:
        if self.container is None:
            attributes = attributes_of(self.owner) or {}
            return list(attributes), list(attributes.values())
        return keys_of(self.container), entries_of(self.container)

    def _fill(self, keys: list[Any], values: list[Any]) -> None:
        live_keys, live = self._live()
        if any(value is LEFT_OUT for value in values):
            now = dict(zip(live_keys, live, strict=True))
            pairs = [
                (key, now.get(key, LEFT_OUT) if value is LEFT_OUT else value)
                for key, value in zip(keys, values, strict=True)
            ]
            keys = [key for key, value in pairs if value is not LEFT_OUT]
            values = [value for _, value in pairs if value is not LEFT_OUT]
        if keys == live_keys and len(values) == len(live) and all(map(is_, values, live)):
            return
        if self.container is not None:
            fill(self.container, keys, values)
            return
        for name in live_keys:
            object.__delattr__(self.owner, name)
        for name, value in zip(keys, values, strict=True):
            object.__setattr__(self.owner, name, value)


class Whole:
    """What a state keeps as a whole, a generator's state, say; where it is large, leaves out."""

    def __init__(
        self,
        path: str,
        owner: Any,
        read: Callable[[], Any],
        write: Callable[[Any], object],
        *,
        num_bytes: int = 0,
    ) -> None:
        self.path, self.owner = path, owner
        self._read, self._write, self._num_bytes = read, write, num_bytes
        self._value = read()
        self._kept = True

    def changed(self) -> bool:
        return not _equal(self._read(), self._value)

    def again(self) -> Mutable:
        return Whole(self.path, self.owner, self._read, self._write, num_bytes=self._num_bytes)

    def restore(self, others: Mapping[int, Tensor]) -> None:
        if self._kept:
            self._write(self._value)

    def too_much(self, registered: Mutable | None, keepable: Keepable) -> list[Any]:
        return [] if self._num_bytes <= MOST_KEPT_BYTES else [self.owner]

    def leave_out(self, registered: Mutable | None, parts: list[Any]) -> list[LeftOut]:
        self._kept = False
        return [LeftOut(self.path, [object()], counts=True, fills=False)]  # equal to no other one

    def differing(self, registered: Mutable | None) -> list[str]:
        return [self.path] if self._kept else []


class Numbers(Whole):
    """A tensor's, with its version counter: a graph that saved it finds the version it saved."""

    def __init__(self, path: str, tensor: Tensor) -> None:
        super().__init__(path, tensor, tensor.detach().clone, tensor.copy_)
        self._data, self._version = tensor.detach(), version_of(tensor)
        self._requires_grad = tensor.requires_grad

    def changed(self) -> bool:
        now, before = self.owner, self._value
        if form(now) != form(before) or now.requires_grad != self._requires_grad:
            return True
        return not equal_numbers(now, before)

    def again(self) -> Mutable:
        return Numbers(self.path, self.owner)

    def too_much(self, registered: Mutable | None, keepable: Keepable) -> list[Any]:
        return [] if is_small(self.owner) else [self.owner]

    @torch.no_grad()
    def restore(self, others: Mapping[int, Tensor]) -> None:
        if not self._kept:
            return
        if self.owner.grad_fn is not None:
            self.owner.detach_()
        if form(self.owner) != form(self._value):
            self.owner.data = self._data
        if self.changed():
            self.owner.data.copy_(self._value)
            self.owner.requires_grad_(self._requires_grad)
        set_versions([self.owner], [self._version])


def exchanged(value: Any, others: Mapping[int, Tensor]) -> Any:
    """Return a value, or what is to be in its place; of a tuple, with its parts exchanged."""
    if not others or not isinstance(value, (Tensor, tuple)):
        return value
    if isinstance(value, Tensor) or not is_rebuildable(value):
        return others.get(id(value), value)
    before = entries_of(value)
    after = [exchanged(part, others) for part in before]
    if all(map(is_, before, after)):
        return value
    return value._make(after) if hasattr(value, "_make") else tuple(after)


def tensors_in(value: Any) -> list[Tensor]:
    """Return a value if it is a tensor; of a tuple, those that `exchanged` would exchange."""
    if isinstance(value, Tensor):
        return [value]
    parts = entries_of(value) if is_rebuildable(value) else []
    return [tensor for part in parts for tensor in tensors_in(part)]


def is_rebuildable(value: Any) -> bool:
    """Return whether a value is a tuple that can be made anew of other parts."""
    return type(value) is tuple or (isinstance(value, tuple) and hasattr(value, "_make"))


def _outline(value: Any) -> Outline:
    return outline(value, most_bytes=MOST_KEPT_BYTES)


def _equal(a: Any, b: Any) -> bool:
    """Return whether two states of a generator, or what holds them, are equal."""
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_equal(a[key], b[key]) for key in a)
    if isinstance(a, Tensor):
        return torch.equal(a, b)
    if hasattr(a, "tobytes"):
        return bool(a.tobytes() == b.tobytes())
    return type(a) is type(b) and bool(a == b)
