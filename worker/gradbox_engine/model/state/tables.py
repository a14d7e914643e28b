"""Hooks that a forward pass registers or removes, and submodules that it exchanges.

They are part of the state S₀ … Sₙ, as plain attributes are. Models of transformers register hooks
that collect hidden states in their first call, and note that in an attribute: with the attribute
restored and the hooks not, every further pass would collect each hidden state once more. Of two
equal submodules that change places in each call, the gradient alone tells which one was called.

What lies inside a submodule that the model was registered without is not looked at. Cost: a look at
every submodule's tables and class once a shard. A checkpoint does not hold them.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from operator import is_
from typing import Any, NamedTuple

from torch import nn

from gradbox_engine.model.state.containers import entries_of, refill

CHILDREN = "_modules"
TABLES = (
    "_parameters",
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
)

NONE: list[Any] = []  # of most hooks


class TableEntries(NamedTuple):
    """The entries of every table, and every submodule's class."""

    entries: list[list[Any]]
    kinds: list[type]


TableState = TableEntries | None
"""None where they are those that the model was registered with."""


class Tables:
    """The live tables that torch keeps in a model's submodules, but for their buffers."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._modules = list(modules)
        attributes = list(map(vars, self._modules))
        found = [own.get(name) for own in attributes for name in TABLES]
        self._tables: list[dict[Any, Any]] = [table for table in found if isinstance(table, dict)]
        # A `ModuleList` binds a new table of its elements where one is taken out.
        self._parents = [own for own in attributes if isinstance(own.get(CHILDREN), dict)]
        self._children: list[dict[Any, Any]] = [own[CHILDREN] for own in self._parents]
        self._first = self._places()
        self._keys, self._values = self._live()

    def state(self) -> TableState:
        """Return what is in them now."""
        return None if self._as_registered() else self._places()

    def restore(self, state: TableState) -> None:
        """Give every submodule the entries and the class of a `state`."""
        if state is None and self._as_registered():
            return
        places = state or self._first
        for own, table in zip(self._parents, self._children, strict=True):
            own[CHILDREN] = table
        tables = (*self._tables, *self._children)
        for table, entries in zip(tables, places.entries, strict=True):
            refill(table, entries)
        for module, kind in zip(self._modules, places.kinds, strict=True):
            if type(module) is not kind:
                module.__class__ = kind

    def _places(self) -> TableEntries:
        entries = [entries_of(table) if table else NONE for table in self._all_tables()]
        return TableEntries(entries, list(map(type, self._modules)))

    def _as_registered(self) -> bool:
        keys, values = self._live()
        return keys == self._keys and all(map(is_, values, self._values))

    def _live(self) -> tuple[list[Any], list[Any]]:
        """Return all keys in one list, and with the classes all values."""
        filled = list(filter(None, self._all_tables()))  # most hold no hooks
        values = chain.from_iterable(map(dict.values, filled))
        return list(chain.from_iterable(filled)), [*values, *map(type, self._modules)]

    def _all_tables(self) -> list[dict[Any, Any]]:
        return [*self._tables, *[own[CHILDREN] for own in self._parents]]
