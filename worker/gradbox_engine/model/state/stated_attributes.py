"""Plain attributes as JSON values, in which a checkpoint hands them to another process.

JSON has no tuple, set or deque, no keys but strings, and no infinity. Of these a dict of one entry
stands for the value: {"tuple": [0, 1]}. A type that only derives from one of these, such as an
enumeration, a `Counter` or a NumPy number, would come back as another one; it is not stated.
"""

from __future__ import annotations

import math
from collections import deque
from typing import Any

import torch

from gradbox_engine.model.state.attributes import ModuleAttributes, State

AS_THEY_ARE = frozenset({type(None), bool, int, str})
IN_WORDS = frozenset({float, complex, torch.dtype, torch.device})
SEQUENCES: dict[type, str] = {tuple: "tuple", list: "list", set: "set"}


def can_be_stated(state: State) -> bool:
    """Tell whether all attributes of a state that are kept have a JSON value each."""
    return all(_has_value(a) for a in state.values() if a is not None)


def stated(state: State) -> dict[str, Any]:
    """Return a state that `can_be_stated` as JSON values."""
    return {name: None if a is None else _value(a) for name, a in state.items()}


def from_stated(values: dict[str, Any]) -> dict[str, ModuleAttributes | None]:
    """Return the state of which `stated` made these values."""
    return {name: None if value is None else _read(value) for name, value in values.items()}


def _has_value(attribute: Any) -> bool:
    kind = type(attribute)
    if kind is dict:
        return all(map(_has_value, attribute)) and all(map(_has_value, attribute.values()))
    if kind is deque or kind in SEQUENCES:
        return all(map(_has_value, attribute))
    return kind in AS_THEY_ARE or kind in IN_WORDS


def _value(attribute: Any) -> Any:
    kind = type(attribute)
    if kind in AS_THEY_ARE or (kind is float and math.isfinite(attribute)):
        return attribute
    if kind is dict:
        return {"dict": [[_value(key), _value(entry)] for key, entry in attribute.items()]}
    if kind is deque:
        return {"deque": list(map(_value, attribute)), "maxlen": attribute.maxlen}
    if kind in SEQUENCES:
        return {SEQUENCES[kind]: list(map(_value, attribute))}
    return {kind.__name__: str(attribute).removeprefix("torch.")}


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
