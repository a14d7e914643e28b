"""States as JSON values, in which a checkpoint hands them to another process.

Of each object or container that was registered and differs there are its path and its entries: each
a key, if there are any, and the place of the same entry when it was registered, or a value, or
neither where it was left out.

JSON has no tuple, set or deque, no keys but strings, and no infinity. Of these a dict of one entry
stands for the value: {"tuple": [0, 1]}. A type that only derives from one of these, such as an
enumeration, a `Counter` or a NumPy number, would come back as another one; it is not stated. Nor
are arrays, tensors, generators, functions, classes, and objects that came since.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from typing import Any

import torch

from gradbox_engine.model.state.model_state import ModelState, State
from gradbox_engine.model.state.mutables import LEFT_OUT, Entries, Mutable

AS_THEY_ARE = frozenset({type(None), bool, int, str})
IN_WORDS = frozenset({float, complex, torch.dtype, torch.device})
SEQUENCES: dict[type, str] = {tuple: "tuple", list: "list", set: "set"}


class NotStated(Exception):
    """Something in a state has no JSON value."""


def can_be_stated(model: ModelState, state: State) -> bool:
    """Tell whether all that a state keeps has a JSON value."""
    try:
        stated(model, state)
    except NotStated:
        return False
    return True


def stated(model: ModelState, state: State) -> list[Any]:
    """Return a state as JSON values.

    Raises:
        NotStated: not all that it keeps has one.
    """
    if len({entries.path for entries in model.entries}) < len(model.entries):
        raise NotStated  # a path does not tell which one is meant
    registered = {id(entries.owner): entries for entries in model.entries}
    return [
        _stated(inside, registered.get(key), state.came) for key, inside in state.changed.items()
    ]


def _stated(inside: Mutable, first: Entries | None, came: Mapping[int, Mutable]) -> list[Any]:
    if first is None or not isinstance(inside, Entries) or inside.kind is not first.kind:
        raise NotStated
    if inside.values is None:
        return [first.path, None]
    places = {id(value): place for place, value in enumerate(first.values or [])}
    return [
        first.path,
        [
            [_value(name, {}) if inside.keys else None, *_entry(value, places, came)]
            for name, value in inside.parts()
        ],
    ]


def _entry(value: Any, places: Mapping[int, int], came: Mapping[int, Mutable]) -> list[Any]:
    if value is LEFT_OUT:
        return []
    return [places[id(value)]] if id(value) in places else [None, _value(value, came)]


def from_stated(model: ModelState, told: list[Any]) -> State:
    """Return the state of which `stated` made these values."""
    registered = {entries.path: entries for entries in model.entries}
    changed: dict[int, Mutable] = {}
    for path, parts in told:
        first = registered[path]
        inside = Entries(path, first.owner, first.container)
        keys, values = [], []
        for name, *entry in parts or []:
            keys.append(_read(name))
            match entry:
                case []:
                    values.append(LEFT_OUT)
                case [place]:
                    values.append((first.values or [])[place])
                case [_, value]:
                    values.append(_read(value))
        inside.keys = keys if isinstance(inside.container, dict) or not inside.is_container else []
        inside.values = None if parts is None else values
        changed[id(first.owner)] = inside
    lacks = any(
        parts is None or any(not entry for _, *entry in parts)  # an array has no one `==`
        for _, parts in told
    )
    return model.state_of(changed, lacks=lacks)


def _value(value: Any, came: Mapping[int, Mutable]) -> Any:
    kind = type(value)
    if kind in AS_THEY_ARE or (kind is float and math.isfinite(value)):
        return value
    if kind in IN_WORDS:
        return {kind.__name__: str(value).removeprefix("torch.")}
    inside = came.get(id(value))
    if isinstance(inside, Entries):  # what was in it then
        keys, values = inside.keys, inside.values or []
    elif kind is tuple:
        keys, values = [], list(value)
    else:
        raise NotStated
    parts = [_value(part, came) for part in values]
    if kind is dict:
        named = zip(keys, parts, strict=True)
        return {"dict": [[_value(key, {}), part] for key, part in named]}
    if kind is deque:
        return {"deque": parts, "maxlen": value.maxlen}
    if kind not in SEQUENCES:
        raise NotStated
    return {SEQUENCES[kind]: parts}


def _read(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    kind, told = next(iter(value.items()))
    match kind:
        case "dict":
            return {_read(key): _read(entry) for key, entry in told}
        case "deque":
            return deque(map(_read, told), maxlen=value["maxlen"])
        case "tuple":
            return tuple(map(_read, told))
        case "list":
            return list(map(_read, told))
        case "set":
            return set(map(_read, told))
        case "dtype":
            return getattr(torch, told)
        case "device":
            return torch.device(told)
        case "complex":
            return complex(told)
        case _:
            return float(told)
