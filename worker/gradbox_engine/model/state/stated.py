"""States as JSON values, in which a checkpoint hands them to another process.

Of each object or container that was registered and differs there are its path and its entries: each
a key, if there are any, and the place of the same entry when it was registered, or a value, or
neither where it was left out.

JSON has no tuple, set or deque, no keys but strings, and no infinity. Of these a dict of one entry
stands for the value: {"tuple": [0, 1]}. A tensor that came since has its place among the state's
copies. A type that only derives from one of these, such as an enumeration, a `Counter` or a NumPy
number, would come back as another one; it is not stated. Nor are functions, classes and objects
that came since, nor what arrays, generators and tensors hold that were there before.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gradbox_engine.model.shared_memory import blocks
from gradbox_engine.model.state.model_state import ModelState, State
from gradbox_engine.model.state.mutables import LEFT_OUT, Entries, Mutable

AS_THEY_ARE = frozenset({type(None), bool, int, str})
IN_WORDS = frozenset({float, complex, torch.dtype, torch.device})
SEQUENCES: dict[type, str] = {tuple: "tuple", list: "list", set: "set"}

Known = dict[int, Mutable | int]
"""By id, what is in that which came since, and the places of copies."""


class NotStated(Exception):
    """Something in a state has no JSON value."""


def can_be_stated(model: ModelState, state: State) -> bool:
    """Return whether all that a state keeps has a JSON value."""
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
    if len(blocks(state.copies)) < len(state.copies):
        raise NotStated  # they would come back each in its own memory
    registered = {id(entries.owner): entries for entries in model.entries}
    known: Known = {**state.came, **{id(copy): n for n, copy in enumerate(state.copies)}}
    return [_stated(inside, registered.get(key), known) for key, inside in state.changed.items()]


def _stated(inside: Mutable, registered: Entries | None, known: Known) -> list[Any]:
    if registered is None or not isinstance(inside, Entries) or inside.kind is not registered.kind:
        raise NotStated
    if inside.values is None:
        return [registered.path, None]
    places = {id(value): place for place, value in enumerate(registered.values or [])}
    return [
        registered.path,
        [
            [_value(name, {}) if inside.keys else None, *_entry(value, places, known)]
            for name, value in inside.parts()
        ],
    ]


def _entry(value: Any, places: Mapping[int, int], known: Known) -> list[Any]:
    if value is LEFT_OUT:
        return []
    return [places[id(value)]] if id(value) in places else [None, _value(value, known)]


def from_stated(model: ModelState, told: list[Any], copies: Sequence[Tensor] = ()) -> State:
    """Return the state of which `stated` made these values, and which had these copies."""
    by_path = {entries.path: entries for entries in model.entries}
    changed: dict[int, Mutable] = {}
    for path, parts in told:
        registered = by_path[path]
        inside = Entries(path, registered.owner, registered.container)
        keys, values = [], []
        for name, *entry in parts or []:
            keys.append(_read(name, copies))
            match entry:
                case []:
                    values.append(LEFT_OUT)
                case [place]:
                    values.append((registered.values or [])[place])
                case [_, value]:
                    values.append(_read(value, copies))
        inside.keys = keys if isinstance(inside.container, dict) or not inside.is_container else []
        inside.values = None if parts is None else values
        changed[id(registered.owner)] = inside
    lacks = any(
        parts is None or any(not entry for _, *entry in parts)  # an array has no one `==`
        for _, parts in told
    )
    return model.state_of(changed, copies, lacks=lacks)


def _value(value: Any, known: Known) -> Any:
    kind = type(value)
    if kind in AS_THEY_ARE or (kind is float and math.isfinite(value)):
        return value
    if kind in IN_WORDS:
        return {kind.__name__: str(value).removeprefix("torch.")}
    inside = known.get(id(value))
    if isinstance(inside, int):
        return {"tensor": inside}
    if isinstance(inside, Entries):  # what was in it then
        keys, values = inside.keys, inside.values or []
    elif kind is tuple:
        keys, values = [], list(value)
    else:
        raise NotStated
    parts = [_value(part, known) for part in values]
    if kind is dict:
        named = zip(keys, parts, strict=True)
        return {"dict": [[_value(key, {}), part] for key, part in named]}
    if kind is deque:
        return {"deque": parts, "maxlen": value.maxlen}
    if kind not in SEQUENCES:
        raise NotStated
    return {SEQUENCES[kind]: parts}


def _read(value: Any, copies: Sequence[Tensor]) -> Any:
    if not isinstance(value, dict):
        return value
    kind, told = next(iter(value.items()))
    match kind:
        case "dict":
            return {_read(key, copies): _read(entry, copies) for key, entry in told}
        case "deque":
            return deque((_read(entry, copies) for entry in told), maxlen=value["maxlen"])
        case "tuple" | "list" | "set":
            entries = (_read(entry, copies) for entry in told)
            return {"tuple": tuple, "list": list, "set": set}[kind](entries)
        case "tensor":
            return copies[told]
        case "dtype":
            return getattr(torch, told)
        case "device":
            return torch.device(told)
        case "complex":
            return complex(told)
        case _:
            return float(told)
