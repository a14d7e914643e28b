"""The entries of dicts, lists, sets and deques that submodules hold: read, compared, put back.

Entries are compared by identity. What did not change is not written to: some libraries hold dicts
that refuse it.
"""

from __future__ import annotations

import enum
from collections import deque
from operator import is_
from typing import Any, Final

import torch

try:
    import numpy
except ImportError:
    numpy = None  # type: ignore[assignment]

CONTAINERS = (dict, list, set, deque)
# Equal ones of these are the same, and nothing in them can change.
VALUES: Final[tuple[type, ...]] = (
    *(bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, enum.Enum),
    *(() if numpy is None else (numpy.generic,)),
)
MOST_ENTRIES: Final = 64  # kept of one: n snapshots of a list that grows would take n² places


def entries_of(container: Any) -> list[Any]:
    """Return the entries of a container or a tuple in order; of a dict each key and its value."""
    if isinstance(container, dict):
        return [part for item in container.items() for part in item]
    if isinstance(container, tuple):
        return list(tuple.__iter__(container))  # a derived one may refuse `iter`, and `len`
    return list(container)


def num_entries(container: Any) -> int:
    """Return how many entries a container or a tuple has; of a dict how many keys."""
    return tuple.__len__(container) if isinstance(container, tuple) else len(container)


def same_entries(a: list[Any], b: list[Any]) -> bool:
    """Return whether two lists hold the same objects."""
    return len(a) == len(b) and all(map(is_, a, b))


def refill(container: Any, entries: list[Any]) -> None:
    """Give a container the entries that it had, where it has others."""
    if same_entries(entries_of(container), entries):
        return
    container.clear()
    if isinstance(container, dict):
        for key, value in zip(entries[::2], entries[1::2], strict=True):
            container[key] = value  # a Counter's `update` would add
    elif isinstance(container, set):
        container.update(entries)
    else:
        container.extend(entries)
