"""Numbers and words that a model keeps as plain attributes: a counter, a phase, a length seen.

They are part of the state S₀ … Sₙ, as buffers are. A schedule that a counter drives may change a
gradient and no output (gradient reversal whose strength grows, a layer that is frozen for its
first calls), so that no comparison of outputs would notice another count in the replay.

A submodule's attributes are kept after a shard where whatever it changed is a number, a word or
None, or a short dict, list, set or deque of these. A submodule that changed anything else as well
(a cached tensor, an object) stays as it is, for half of its state is worse than none; it begins a
second pass as it began the first. If a number or word was among it, or in it, or it varies from
shard to shard (see `outlines`), that is lost: the second pass takes all shards in their order, and
the job writes no checkpoint from there on, for another process could not go on from it.

Cost: a look at every submodule's attributes once a shard. What lies inside objects, and tensors
that are overwritten in place, are kept by `objects`.
"""

from __future__ import annotations

from collections.abc import Mapping
from operator import is_, itemgetter
from typing import Any, Final

import torch
from torch import nn

from gradbox_engine.model.state.containers import (
    CONTAINERS,
    MOST_ENTRIES,
    VALUES,
    entries_of,
    num_entries,
    refill,
    same_entries,
)
from gradbox_engine.model.state.outlines import (
    Outline,
    beyond_kinds,
    outline,
    same_outline,
    varied,
)
from gradbox_engine.model.state.scripted import bind, scripted_attributes

OF_TORCH = frozenset(vars(nn.Module())) - {"training"}

ABSENT: Final = object()

ModuleAttributes = dict[str, Any]
State = Mapping[str, ModuleAttributes | None]
"""By submodule, the attributes that differ in it or were there; None where they cannot be kept.
A submodule that is not named has those that it was registered with."""


class Attributes:
    """The live attributes of a model's submodules, but for those that torch keeps itself."""

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self._modules = {
            name: (_Scripted if isinstance(module, torch.jit.ScriptModule) else _Registered)(module)
            for name, module in modules.items()
        }
        self._outlines: dict[tuple[str, str], Outline] | None = None

    @property
    def lost(self) -> bool:
        """Whether a `state` left out a number or a word, or what varied from shard to shard."""
        return any(module.lost for module in self._modules.values())

    @property
    def left_out(self) -> bool:
        """Whether a `state` left out a number or a word, numbers of a tensor, or a length."""
        return self.lost or any(module.left_out for module in self._modules.values())

    @property
    def filled(self) -> bool:
        """Whether a `state` left out what a shard put where there was nothing."""
        return any(module.filled for module in self._modules.values())

    def state(self) -> dict[str, ModuleAttributes | None]:
        """Return what the submodules hold after a shard that they were not registered with."""
        before, self._outlines = self._outlines, {}
        found: dict[str, ModuleAttributes | None] = {}
        for name, module in self._modules.items():
            if module.changed():
                found[name] = module.attributes()
                if found[name] is None:
                    self._outlines |= {(name, own): o for own, o in module.outlines.items()}
        for name, _ in varied(before, self._outlines):
            self._modules[name].lost = True
        return found

    def changed(self, state: State) -> tuple[str, ...]:
        """Return the full names of plain attributes that have another value than registered.

        Of a submodule where some of them are lost it is the submodule's own.
        """
        names: list[str] = []
        for module, attributes in state.items():
            if attributes is None:
                names += [module or "the model"] if self._modules[module].lost else []
                continue
            differing = self._modules[module].differing(attributes)
            names += [f"{module}.{name}" if module else name for name in differing]
        return tuple(names)

    def restore(self, state: State) -> None:
        """Give every submodule the attributes of a `state`, where it has them."""
        for name, module in self._modules.items():
            attributes = state.get(name, {})
            if attributes is None:
                continue
            if attributes or module.changed():
                module.restore()
                module.update(attributes)


def restorable(state: State) -> dict[str, ModuleAttributes]:
    """Return a state without the submodules whose attributes cannot be kept."""
    return {name: attributes for name, attributes in state.items() if attributes is not None}


class _Registered:
    """One submodule's attributes as they were when the job began.

    `lost` tells whether `attributes` has been None although plain ones had changed, or were gone;
    `outlines` are of the others, by name, where it last was None; `left_out` tells whether more
    than bare kinds in them was not as registered, `filled` whether one was None or not there.
    """

    def __init__(self, module: nn.Module) -> None:
        self.lost = self.left_out = self.filled = False
        self.outlines: dict[str, Outline] = {}
        self._live = vars(module)
        self._first = self._live.copy()
        own = self._live.keys() - OF_TORCH
        # One call of C for every shard and submodule; of two names or more it returns a tuple.
        self._read = itemgetter(*own, *own) if own else lambda _: ()
        self._values = self._read(self._live)
        self._containers = [
            (value, entries_of(value))
            for value in map(self._live.get, own)
            if isinstance(value, CONTAINERS)
        ]
        self._entries = {id(container): kept for container, kept in self._containers}

    def changed(self) -> bool:
        try:
            same = all(map(is_, self._read(self._live), self._values))
        except KeyError:
            return True
        if not same or len(self._live) != len(self._first):
            return True
        return bool(self._containers) and any(
            not same_entries(entries_of(container), kept) for container, kept in self._containers
        )

    def attributes(self) -> ModuleAttributes | None:
        """Return what differs; None if not all of it is plain. A name that is gone is named too."""
        own = {n: v for n, v in self._live.items() if n not in OF_TORCH}
        found: ModuleAttributes = {}
        gone = any(name not in self._live for name in self._first)
        all_kept, lost = not gone, gone
        self.outlines = {}
        for name, value in own.items():
            kept = self._entries.get(id(value))
            if value is self._first.get(name, ABSENT) and (
                kept is None or same_entries(entries_of(value), kept)
            ):
                continue
            if _is_plain(value):
                found[name] = value.copy() if isinstance(value, CONTAINERS) else value
            else:
                all_kept, now = False, outline(value)
                if now is None:
                    lost = True
                else:
                    self.outlines[name] = now
        if all_kept:
            return found
        self.lost = self.lost or lost or bool(found)
        self.left_out = self.left_out or any(map(self._has_numbers, self.outlines))
        self.filled = self.filled or any(self._first.get(name) is None for name in self.outlines)
        return None

    def _has_numbers(self, name: str) -> bool:
        """Tell whether an outline has more than bare kinds, and that not as registered."""
        now = beyond_kinds(self.outlines[name])
        if not now:
            return False
        first = self._first.get(name)
        before = outline(self._entries.get(id(first), first)) or []
        return not same_outline(now, beyond_kinds(before))

    def differing(self, attributes: ModuleAttributes) -> list[str]:
        """Return the names of those whose value is not the registered one."""
        differing = []
        for name, value in attributes.items():
            first = self._first.get(name, ABSENT)
            kept = self._entries.get(id(first))
            if kept is None or type(value) is not type(first):
                same = _equal(value, first)
            else:
                same = entries_of(value) == kept
            if not same:
                differing.append(name)
        return differing

    def restore(self) -> None:
        for container, entries in self._containers:
            refill(container, entries)
        for name in [n for n in self._live if n not in self._first and n not in OF_TORCH]:
            del self._live[name]
        self._live.update({n: v for n, v in self._first.items() if n not in OF_TORCH})

    def update(self, attributes: ModuleAttributes) -> None:
        for name, value in attributes.items():
            live = self._live.get(name)
            if type(live) is type(value) and isinstance(live, CONTAINERS):
                refill(live, entries_of(value))  # others may hold the same container
            elif isinstance(value, CONTAINERS):
                self._live[name] = value.copy()
            else:
                self._live[name] = value


class _Scripted:
    """The same of a scripted submodule, `lost` too; there are no outlines."""

    outlines: Final[Mapping[str, Outline]] = {}
    left_out: Final = False
    filled: Final = False

    def __init__(self, module: nn.Module) -> None:
        self.lost = False
        self._module = module
        self._first = {n: v for n, v in scripted_attributes(module).items() if _is_plain(v)}

    def changed(self) -> bool:
        return bool(self._differing())

    def attributes(self) -> ModuleAttributes | None:
        found = self._differing()
        if all(map(_is_plain, found.values())):
            return found
        self.lost = True
        return None

    def differing(self, attributes: ModuleAttributes) -> list[str]:
        return list(attributes)

    def restore(self) -> None:
        bind(self._module, self._first)

    def update(self, attributes: ModuleAttributes) -> None:
        bind(self._module, attributes)

    def _differing(self) -> ModuleAttributes:
        now = scripted_attributes(self._module) if self._first else {}
        return {n: now[n] for n, first in self._first.items() if not _equal(now[n], first)}


def _equal(a: Any, b: Any) -> bool:
    return type(a) is type(b) and bool(a == b)


def _is_plain(value: Any) -> bool:
    if isinstance(value, (*CONTAINERS, tuple)):
        return num_entries(value) <= MOST_ENTRIES and all(map(_is_constant, entries_of(value)))
    return isinstance(value, VALUES)


def _is_constant(value: Any) -> bool:
    if isinstance(value, tuple):
        return num_entries(value) <= MOST_ENTRIES and all(map(_is_constant, entries_of(value)))
    return isinstance(value, VALUES)
