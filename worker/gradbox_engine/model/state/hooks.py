"""Hooks that a model registers on its submodules, or removes, in its forward pass.

They are part of the state S₀ … Sₙ, as plain attributes are. Models of transformers register hooks
that collect hidden states in their first call, and note that in an attribute: with the attribute
restored and the hooks not, every further pass would collect each hidden state once more.

Cost: a look at every submodule's tables once a shard. A checkpoint does not hold them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

TABLES = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
)

NONE: dict[int, Any] = {}  # of most submodules

HookState = list[dict[int, Any]] | None
"""The entries of every table; None where they are those that the model was registered with."""


class Hooks:
    """The live hooks of a model's submodules."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        found = [attributes.get(n) for attributes in map(vars, modules) for n in TABLES]
        self._tables: list[dict[int, Any]] = [t for t in found if isinstance(t, dict)]
        self._keys = self._live_keys()
        self._first = [dict(table) if table else NONE for table in self._tables]

    def state(self) -> HookState:
        """Return the hooks that there are now."""
        if self._live_keys() == self._keys:
            return None
        return [dict(table) for table in self._tables]

    def restore(self, state: HookState) -> None:
        """Give every submodule the hooks of a `state`, in their order."""
        if state is None and self._live_keys() == self._keys:
            return
        for table, entries in zip(self._tables, state or self._first, strict=True):
            if list(table) != list(entries):
                table.clear()
                table.update(entries)

    def _live_keys(self) -> list[tuple[int, ...]]:
        # A hook's number is never used again; most tables are empty.
        return [(id(table), *table) for table in filter(None, self._tables)]
