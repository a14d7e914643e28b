"""Putting functions in place of others, and back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any


@contextmanager
def names_replaced(
    namespace: dict[str, Any],
    instead: Mapping[int, Callable[..., Any]],
    *,
    names: Iterable[str] | None = None,
) -> Iterator[None]:
    """Replace the functions of a module that have a stand-in.

    Args:
        namespace: the module's names.
        instead: the stand-ins, by the identity of what each stands for.
        names: where to look; everywhere by default.
    """
    searched = namespace.copy() if names is None else {name: namespace[name] for name in names}
    before = {name: value for name, value in searched.items() if id(value) in instead}
    namespace.update({name: instead[id(value)] for name, value in before.items()})
    try:
        yield
    finally:
        namespace.update(before)


@contextmanager
def methods_replaced(instead: Mapping[tuple[type, str], Any]) -> Iterator[None]:
    """Replace methods, named by class and name."""
    before = [(kind, name, vars(kind).get(name)) for kind, name in instead]
    for (kind, name), method in instead.items():
        setattr(kind, name, method)
    try:
        yield
    finally:
        for kind, name, own in before:  # None where it was inherited
            setattr(kind, name, own) if own is not None else delattr(kind, name)
