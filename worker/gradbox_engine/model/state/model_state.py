"""Everything about a model that can change, but the numbers of its parameters and buffers.

A schedule that counts its calls may change a gradient and no output, so that no comparison of
outputs would notice another count in the replay. So all that a shard changed is part of S₀ … Sₙ:
attributes, what lies inside them, hooks, submodules, classes.

A module is an object: its attributes, its tables and its class are entries like any other. One walk
from the model finds everything that can change: attributes of modules and of objects, entries of
dicts, lists, sets, deques and tuples, what a bound method or a `functools.partial` holds. Objects
of Python's library, torch and NumPy have states of their own and are left alone, but for arrays,
tensors and random generators. So is what a function closes over: a hook may note something there
for whoever registered it.

Asked after a shard, what differs from when the walk was made is its state, entry by entry. An entry
that came since belongs to it if it is a number, a word, a function, a parameter, a small tensor
without a graph, or something that holds nothing else. Any other stays as it is, for n states
would hold n of them, each with its graph: see `outlines`.

Cost: a walk and a copy of the numbers when a job begins; a comparison of all entries by identity
after each shard, of unregistered tensors and arrays by value. Not looked at: global variables,
iterators, arrays and tensors beyond 16 MiB, and the inside of attributes that hold more than 10,000
entries in all, as a trainer with its data does.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import chain
from operator import is_, methodcaller
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any, Final

import torch
from torch import Tensor, nn

from gradbox_engine.model.shared_memory import copies
from gradbox_engine.model.state.containers import (
    CONTAINERS,
    VALUES,
    num_entries,
    parts_of,
    path_to,
)
from gradbox_engine.model.state.mutables import (
    Entries,
    LeftOut,
    Mutable,
    Numbers,
    can_be_put_back,
    global_generators,
    is_rebuildable,
    is_small,
    mutable,
    tensors_in,
)
from gradbox_engine.model.state.outlines import Outline
from gradbox_engine.model.tensor_equality import storages_of
from gradbox_engine.torch_private import buffers_of, parameters_of

OF_TORCH: Final = frozenset(vars(nn.Module())) - {"training"} | {"__class__"}
TABLES: Final = frozenset(n for n, v in vars(nn.Module()).items() if isinstance(v, CONTAINERS))
# Of most attributes: nothing is inside these.
ATOMS: Final = frozenset({*VALUES, torch.Size, slice, type, type(len), FunctionType})
CONSTANT: Final = (*VALUES, FunctionType, BuiltinFunctionType, type, nn.Parameter)
COMPOSED: Final = (tuple, partial, MethodType)
MOST_INSIDE: Final = 10_000

Place = tuple[str, Any]
"""How messages call a value, and the value."""


@dataclass(frozen=True)
class State:
    """What differs from the registered model."""

    changed: Mapping[int, Mutable] = field(default_factory=dict)
    """By id, what is in that which was registered and holds something else now."""
    came: Mapping[int, Mutable] = field(default_factory=dict)
    """What is in that which came since."""
    kept: frozenset[int] = frozenset()
    """The ids of `changed` without that in which all that differs was left out."""
    names: tuple[str, ...] = ()
    """The paths of attributes that differ, themselves or inside."""
    copies: tuple[Tensor, ...] = ()
    """Those of tensors that came since, which stand for them in here. The model gets others, so
    that what a graph saved and what a state holds are never written to."""

    def __bool__(self) -> bool:
        return bool(self.changed)


AS_REGISTERED: Final = State()


class ModelState:
    """A model's state when this was made, and what differs from it later.

    Which buffers are bound belongs to it, and what registered ones hold does not: see `buffers`.
    """

    def __init__(self, model: nn.Module) -> None:
        """Walk through a model."""
        self.in_order = False
        """Whether what states left out varied from shard to shard: a second pass has to take all
        shards, in their order."""
        self.lacks_counts = False
        """Whether one left out numbers or lengths: no pass may begin with a later shard."""
        self.lacks_fillings = False
        """Whether one left out what came where there was nothing."""
        self._registered: dict[int, Mutable] = {}
        self._empty: list[Any] = []  # most tables of hooks
        self._seen = global_generators()
        self._before: dict[str, Outline] | None = None  # of what the shard before left out
        self._model = model
        self.modules = list(model.named_modules())
        """Each once, behind its name."""
        self._tables_of_buffers = {id(buffers_of(module)) for _, module in self.modules}
        self.tensors = self._find()
        """Those that are registered nowhere."""
        mutables = self._registered.values()
        self._in_dicts = [e for e in mutables if isinstance(e, Entries) and _in_dict(e)]
        self._others = [inside for inside in mutables if not _in_dict(inside)]
        self._dicts = [entries.container for entries in self._in_dicts]
        self._owners = [entries.owner for entries in self._in_dicts]
        self._keys, self._values = self._live()

    def state(self) -> State:
        """Return what differs after a shard, and bind tensors that came since to copies."""
        changed = {id(inside.owner): inside.again() for inside in self._changed()}
        if not changed:  # as by most models
            self._note([])
            return AS_REGISTERED
        came = self._came_since(changed.values())
        keepable = partial(self._is_keepable, came=came)
        left: list[LeftOut] = []
        for key, inside in changed.items():
            if key in self._tables_of_buffers:  # all are kept
                continue
            registered = self._registered.get(key)
            if parts := inside.too_much(registered, keepable):
                left += inside.leave_out(registered, parts)
        self._note(left)
        holders = [e for e in (*changed.values(), *came.values()) if isinstance(e, Entries)]
        copied = _copies(self._new_tensors(holders))
        if copied:
            holders = [entries for entries in holders if entries.exchange(copied)]
            others = _copies(copied.values())
            for entries in holders:
                entries.restore(others)
        differing = {key: m.differing(self._registered.get(key)) for key, m in changed.items()}
        kept = frozenset(key for key, names in differing.items() if names)
        names = sorted(chain.from_iterable(differing.values()))
        attributes = tuple(name for name in names if name.rpartition(".")[2] not in OF_TORCH)
        kept -= self._tables_of_buffers
        return State(changed, came, kept, attributes, tuple(copied.values()))

    def _new_tensors(self, holders: Iterable[Entries]) -> list[Tensor]:
        """Return those that came since; not views of registered ones, by which a model may write
        to these."""
        new = [
            tensor
            for entries in holders
            for value in entries.values or []
            for tensor in tensors_in(value)
            if not isinstance(tensor, nn.Parameter) and id(tensor) not in self._seen
        ]
        if not new:
            return []
        buffers = filter(torch.is_tensor, self.bound(AS_REGISTERED).values())
        others = (
            inside.owner for inside in self._registered.values() if isinstance(inside, Numbers)
        )
        registered = storages_of(chain(self._model.parameters(), buffers, others))
        return [tensor for tensor in new if not storages_of([tensor]).keys() & registered.keys()]

    def restore(self, state: State) -> None:
        """Put back what was there when a `state` was taken; its tensors that came as copies."""
        others = _copies(state.copies)
        if state or not self._is_as_registered():
            for key, registered in self._registered.items():
                if key not in state.changed:
                    registered.restore(others)
            for table in filter(None, self._empty):
                if id(table) not in state.changed:
                    table.clear()
        else:
            for other in self._others:
                other.restore(others)
        for inside in (*state.changed.values(), *state.came.values()):
            inside.restore(others)

    def restore_buffers(self) -> None:
        """Bind the names of buffers to the registered ones."""
        for key in self._tables_of_buffers & self._registered.keys():
            self._registered[key].restore({})

    def bound(self, state: State) -> dict[tuple[str, str], Tensor | None]:
        """Return what is bound to buffers' names, each beside its submodule's, in a state."""
        buffers: dict[tuple[str, str], Tensor | None] = {}
        for path, module in self.modules:
            key = id(buffers_of(module))
            table = state.changed.get(key) or self._registered.get(key)
            if isinstance(table, Entries):
                buffers |= {(path, name): buffer for name, buffer in table.parts()}
        return buffers

    def _find(self) -> list[Tensor]:
        """Note what can change in submodules, then what lies inside their attributes."""
        for _, module in self.modules:
            registered = chain(parameters_of(module).values(), buffers_of(module).values())
            self._seen.update(map(id, (module, *registered)))
        places: list[Place] = []
        for path, module in self.modules:
            attributes = vars(module)
            self._registered[id(module)] = Entries(path, module, attributes)
            for name, value in attributes.items():
                if name in TABLES and isinstance(value, CONTAINERS):
                    if value:
                        self._registered[id(value)] = Entries(
                            path_to(name, path, module), value, value
                        )
                    else:
                        self._empty.append(value)
                elif name not in OF_TORCH and type(value) not in ATOMS:
                    places.append((path_to(name, path, module), value))
        self._seen.update(self._registered)
        mutables, tensors = _inside(places, self._seen)
        self._registered |= mutables
        for path, tensor in tensors:
            if can_be_put_back(tensor):
                self._registered[id(tensor)] = Numbers(path, tensor)
        return [tensor for _, tensor in tensors]

    def _came_since(self, changed: Iterable[Mutable]) -> dict[int, Mutable]:
        """Return by id what can change inside new entries, where all that it holds can be kept."""
        entries = [inside for inside in changed if isinstance(inside, Entries)]
        places = [
            (path_to(name, e.path, e.owner), value) for e in entries for name, value in e.parts()
        ]
        came, _ = _inside(places, set(self._seen))
        keepable = partial(self._is_keepable, came=came)
        while too_much := [key for key, inside in came.items() if inside.too_much(None, keepable)]:
            for key in too_much:
                del came[key]
        return came

    def _is_keepable(
        self, value: Any, came: Mapping[int, Mutable], *, exchangeable: bool = True
    ) -> bool:
        if isinstance(value, CONSTANT) or id(value) in self._seen or id(value) in came:
            return True
        if isinstance(value, Tensor):
            return exchangeable and is_small(value)
        exchangeable = exchangeable and is_rebuildable(value)
        return isinstance(value, COMPOSED) and all(
            self._is_keepable(part, came, exchangeable=exchangeable) for _, part in parts_of(value)
        )

    def _note(self, left: list[LeftOut]) -> None:
        outlines = {part.path: part.outline for part in left}
        self.in_order |= self._before is not None and outlines != self._before
        self.lacks_counts |= any(part.counts for part in left)
        self.lacks_fillings |= any(part.fills for part in left)
        self._before = outlines

    def _changed(self) -> list[Mutable]:
        """Return that in which something else is now; of a table that was empty, its entries."""
        changed = [other for other in self._others if other.changed()]
        if self._is_as_registered():
            return changed
        in_dicts = [entries for entries in self._in_dicts if entries.changed()]
        filled = [self._empty_tables[id(table)].again() for table in self._empty if table]
        return [*in_dicts, *filled, *changed]

    @cached_property
    def _empty_tables(self) -> dict[int, Entries]:
        """By id, the tables of submodules that were empty, which few ask for."""
        empty, tables = set(map(id, self._empty)), {}
        for path, module in self.modules:
            attributes = self._registered[id(module)]
            assert isinstance(attributes, Entries)
            for name, value in attributes.parts():
                if id(value) in empty:
                    tables[id(value)] = table = Entries(path_to(name, path, module), value, value)
                    table.keys, table.values = [], []
        return tables

    def _is_as_registered(self) -> bool:
        """Return whether dicts and attributes hold what was registered, not only what equals it."""
        if any(self._empty):
            return False
        keys, values = self._live()
        return (
            len(values) == len(self._values)
            and keys == self._keys
            and all(map(is_, values, self._values))
        )

    def _live(self) -> tuple[list[Any], list[Any]]:
        """Return all keys of dicts in one list, and all values with the owners' classes."""
        values = chain.from_iterable(map(methodcaller("values"), self._dicts))
        return list(chain.from_iterable(self._dicts)), [*values, *map(type, self._owners)]


def _inside(places: Iterable[Place], seen: set[int]) -> tuple[dict[int, Mutable], list[Place]]:
    """Return what can change inside values by id, and the tensors; all of it is `seen` then.

    Nothing where that is more than is looked at.
    """
    mutables: dict[int, Mutable] = {}
    tensors: list[Place] = []
    num_inside = 0
    left = deque(places)
    while left:
        path, value = left.popleft()
        if type(value) in ATOMS or id(value) in seen:
            continue
        seen.add(id(value))
        num_inside += num_entries(value) if isinstance(value, (*CONTAINERS, tuple)) else 1
        if num_inside > MOST_INSIDE:
            return {}, []
        if (inside := mutable(path, value)) is not None:
            mutables[id(value)] = inside
        if isinstance(value, Tensor):
            tensors.append((path, value))
        for name, part in parts_of(value):
            if type(part) not in ATOMS and id(part) not in seen:
                left.append((path_to(name, path, value), part))
    return mutables, tensors


def _copies(tensors: Collection[Tensor]) -> dict[int, Tensor]:
    """Return leaves of the same numbers by id, which lie in each other's memory as tensors do."""
    if not tensors:  # as of most shards of most models
        return {}
    leaves = copies(tensors)
    for tensor in tensors:
        leaves[id(tensor)].requires_grad_(tensor.requires_grad and tensor.is_leaf)
    return leaves


def _in_dict(inside: Mutable) -> bool:
    return isinstance(inside, Entries) and isinstance(inside.container, dict)
