"""State inside what submodules keep as plain attributes: objects, nested containers, generators.

A schedule that counts in an object, a NumPy array or an unregistered tensor that is written to, a
list in a dict, a random generator of the model's own: all of it belongs to S₀ … Sₙ, as the
attributes themselves do (see `attributes`), and is put back after the job.

Followed from every attribute of a submodule: dicts, lists, sets, deques and tuples, the attributes
of objects and of modules that are registered nowhere, what a bound method or a `functools.partial`
holds. Objects of Python's library, torch and NumPy have states of their own and are left alone, but
for NumPy's arrays and the random generators of all three. So is what a function closes over: a hook
may note something there for whoever registered it.

What shards changed is kept where it is small and holds no tensor that came since: n snapshots would
keep n of them, each with its graph. Else it stays as it is, and may be lost, as with `attributes`.

Cost: a walk over all of it and a copy of its numbers when a job begins, a comparison after each
shard, of tensors and arrays by value. Not covered: global variables, iterators, arrays and tensors
beyond 16 MiB. Nothing is looked at of a model that holds more than 10,000 entries so, a trainer
with its data, say.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from types import FunctionType
from typing import Any, Final

import torch
from torch import Tensor, nn

from gradbox_engine.model.state.attributes import OF_TORCH
from gradbox_engine.model.state.containers import CONTAINERS, VALUES, entries_of, num_entries
from gradbox_engine.model.state.mutables import (
    Mutable,
    global_generators,
    mutable,
    parts_of,
)
from gradbox_engine.model.state.outlines import Outline, beyond_kinds, outline, varied

# Of most attributes: nothing is inside these.
ATOMS: Final = frozenset({*VALUES, torch.Size, slice, type, type(len), FunctionType})
MOST_INSIDE: Final = 10_000

ObjectState = Mapping[int, Mutable | None] | None
"""By id, what differs from when the job began, and what came since; its values are None where that
cannot be kept and stays as it is. None where nothing differs."""


class Objects:
    """What is inside the attributes of a model's submodules."""

    def __init__(self, modules: Iterable[tuple[str, nn.Module]]) -> None:
        self._modules = list(modules)
        found, tensors = self._inside()
        self._first = found | _numbers(tensors)
        self.tensors = [tensor for _, tensor in tensors]
        self._before: dict[int, Outline] | None = None  # after the shard before, if there was one
        self._outlines: dict[int, Outline] = {}  # after the last shard
        self.lost = False
        """Whether a `state` left out a number or a word, or what varied from shard to shard."""
        self.left_out = False
        """Whether one left out numbers of a tensor, or a length."""

    def state(self) -> ObjectState:
        """Return what is inside after a shard that was not when this was made."""
        self._outlines = {}
        changed = any(found.changed() for found in self._first.values())
        state = self._differing() if changed else None
        self.lost = self.lost or bool(varied(self._before, self._outlines))
        self._before = self._outlines
        return state

    def _differing(self) -> ObjectState:
        found, tensors = self._inside()
        inside = found | _numbers((path, t) for path, t in tensors if id(t) in self._first)
        differing = {
            key: now
            for key, now in inside.items()
            if key not in self._first or self._first[key].changed()
        }
        new = {key: now.new(self._first.get(key)) for key, now in differing.items()}
        if all(
            parts is not None and all(_can_be_kept(part, inside) for part in parts)
            for parts in new.values()
        ):
            return differing
        for key, parts in new.items():
            self._leave_out(key, parts, of_container=isinstance(differing[key].owner, CONTAINERS))
        return dict.fromkeys(differing)

    def _leave_out(self, key: int, new: list[Any] | None, *, of_container: bool) -> None:
        """Note what is new in something and is not kept; of a container also how much it is."""
        now = None if new is None else outline(new if of_container else tuple(new))
        if now is None:
            self.lost = True
        elif key in self._first:
            self._outlines[key] = now
            self.left_out = self.left_out or bool(beyond_kinds(now))

    def restore(self, state: ObjectState) -> None:
        """Put back what was inside when a `state` was taken."""
        kept = state or {}
        for key, registered in self._first.items():
            if key not in kept:
                registered.restore()
        for found in kept.values():
            if found is not None:
                found.restore()

    def _inside(self) -> tuple[dict[int, Mutable], list[tuple[str, Tensor]]]:
        """Return all that can change but tensors, by id, and the unregistered tensors by path."""
        found: dict[int, Mutable] = {}
        tensors: list[tuple[str, Tensor]] = []
        num_inside = 0
        seen = {id(module) for _, module in self._modules} | global_generators()
        for _, module in self._modules:
            seen.update(map(id, (*module._parameters.values(), *module._buffers.values())))
        left = [place for path, module in self._modules for place in _places(path, module)]
        while left:
            path, value = left.pop()
            if type(value) in ATOMS or id(value) in seen:
                continue
            seen.add(id(value))
            num_inside += num_entries(value) if isinstance(value, (*CONTAINERS, tuple)) else 1
            if num_inside > MOST_INSIDE:
                return {}, []
            if isinstance(value, Tensor):
                tensors.append((path, value))
            elif (inside := mutable(path, value)) is not None:
                found[id(value)] = inside
            left += _mutable_parts(path, value)
        return found, tensors


def _places(path: str, module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Return what a submodule's attributes hold; these are its own state themselves."""
    attributes = vars(module)
    for name in attributes.keys() - OF_TORCH:
        value = attributes[name]
        if type(value) in ATOMS:
            continue
        place = f"{path}.{name}" if path else name
        if isinstance(value, CONTAINERS):
            yield from _mutable_parts(place, value)
        else:
            yield place, value


def _mutable_parts(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Return what a value holds that may have something inside."""
    for beyond, part in parts_of(value):
        if type(part) not in ATOMS:
            yield path + beyond, part


def _numbers(tensors: Iterable[tuple[str, Tensor]]) -> dict[int, Mutable]:
    return {id(t): found for path, t in tensors if (found := mutable(path, t)) is not None}


def _can_be_kept(part: Any, inside: Mapping[int, Mutable]) -> bool:
    """Tell whether a snapshot may hold a part; what is inside it is asked by itself."""
    if isinstance(part, tuple):
        return all(_can_be_kept(one, inside) for one in entries_of(part))
    return isinstance(part, VALUES) or id(part) in inside
