"""What values hold: entries of dicts, lists, sets, deques and tuples, attributes of objects.

Entries are compared by identity. What did not change is not written to: some libraries hold dicts
that refuse it.
"""

from __future__ import annotations

import enum
import functools
import sys
from collections import deque
from collections.abc import Iterable
from types import MemberDescriptorType, MethodType, SimpleNamespace
from typing import Any, Final

import torch
from torch import Tensor, nn

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
MOST_ENTRIES: Final = 64  # new ones kept of one: n states of a list that grows would take n² places
# Their objects have states of their own, and are left alone.
LIBRARIES: Final = frozenset(sys.stdlib_module_names) | {"torch", "numpy"}


def entries_of(container: Any) -> list[Any]:
    """Return the entries of a container or a tuple in order; of a mapping its values."""
    if isinstance(container, dict):
        return list(container.values())
    if isinstance(container, tuple):
        return list(tuple.__iter__(container))  # a derived one may refuse `iter`, and `len`
    return list(container)


def keys_of(container: Any) -> list[Any]:
    """Return a mapping's keys; other containers have none."""
    return list(container) if isinstance(container, dict) else []


def num_entries(container: Any) -> int:
    """Return how many entries a container or a tuple has; of a dict how many keys."""
    return tuple.__len__(container) if isinstance(container, tuple) else len(container)


def fill(container: Any, keys: list[Any], values: list[Any]) -> None:
    """Give a container these entries and no others; keys are a mapping's."""
    container.clear()
    if isinstance(container, dict):
        for key, value in zip(keys, values, strict=True):
            container[key] = value  # a Counter's `update` would add
    elif isinstance(container, set):
        container.update(values)
    else:
        container.extend(values)


def attributes_of(value: Any) -> dict[str, Any] | None:
    """Return an object's attributes, the live dict if it has one; None of one left alone."""
    if isinstance(value, (type, Tensor, enum.Enum)):
        return None
    of_library = type(value).__module__.partition(".")[0] in LIBRARIES
    if of_library and not isinstance(value, (nn.Module, SimpleNamespace)):
        return None
    try:
        attributes: dict[str, Any] = object.__getattribute__(  # and of no proxy's object
            value, "__dict__"
        )
    except AttributeError:
        return {name: getattr(value, name) for name in slots_of(value) if hasattr(value, name)}
    return attributes


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


def parts_of(value: Any) -> Iterable[tuple[Any, Any]]:
    """Return what a value holds, each with its key, index or name; nothing of one left alone."""
    if isinstance(value, dict):
        return list(value.items())
    if isinstance(value, (*CONTAINERS, tuple)):
        return enumerate(entries_of(value))
    if isinstance(value, functools.partial):
        return enumerate((value.func, value.args, value.keywords))
    if isinstance(value, MethodType):
        return [(0, value.__self__)]
    return list((attributes_of(value) or {}).items())


def path_to(name: Any, path: str, holder: Any) -> str:
    """Return how messages call a part of what `path` names."""
    if isinstance(holder, (*CONTAINERS, tuple)):
        return f"{path}[{name}]"
    return f"{path}.{name}" if path else str(name)
