"""From a name of the allow-list to the function it means, and back.

Looking a name up imports torch and reads attributes of the modules named here, nothing else; a name
that is not on the allow-list is never looked up.
"""

from __future__ import annotations

import builtins
import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, Final

import torch
import torch.fft
import torch.linalg
import torch.nn.functional
import torch.special

from gradbox.graphs import allow_list

_MODULES: Final[dict[str, Any]] = {
    "torch": torch,
    "torch.nn.functional": torch.nn.functional,
    "torch.linalg": torch.linalg,
    "torch.special": torch.special,
    "torch.fft": torch.fft,
    "operator": operator,
    "math": math,
    "builtins": builtins,
}


def field(record: Any, name: str) -> Any:
    """Return a field of a model's output, which is a mapping, a named tuple or a dataclass.

    Raises:
        TypeError: the value has no fields.
        KeyError: it has no field of that name.
    """
    if isinstance(record, Mapping):
        if name not in record:
            raise KeyError(f"no field {name!r}; the value has {', '.join(map(str, record))}")
        return record[name]
    if is_dataclass(record) and name in {entry.name for entry in fields(record)}:
        return getattr(record, name)
    places: tuple[str, ...] = getattr(type(record), "_fields", ())
    if not isinstance(record, tuple) or name not in places:
        raise TypeError(
            f"{type(record).__name__} has no field {name!r}; a mapping, a named tuple or a "
            "dataclass was expected"
        )
    return record[places.index(name)]


def _resolve(name: str) -> Callable[..., Any] | None:
    if name == allow_list.FIELD:
        return field
    module, _, attribute = name.rpartition(".")
    return getattr(_MODULES[module], attribute, None)


# Looked up at import: tracing replaces some of these functions for its duration.
# A name that the installed torch lacks is left out.
FUNCTIONS: Final = {
    name: function for name in allow_list.FUNCTIONS if (function := _resolve(name)) is not None
}
_NAMES: Final = {id(function): name for name, function in reversed(FUNCTIONS.items())}


def name_of(function: Any) -> str | None:
    """Return the name under which the allow-list knows a function, or None."""
    return _NAMES.get(id(function))
