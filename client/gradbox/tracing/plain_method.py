"""Method calls in the one form that each has in a graph, whatever Python called.

`z.cpu()` is a move to the job's device; `1 - z` calls `__rsub__`, which is an operator with its
operands exchanged.
"""

from __future__ import annotations

import operator
from types import MethodDescriptorType
from typing import Any, Final

import torch

_OLD_DIVISIONS: Final = frozenset({"__div__", "__rdiv__", "__idiv__"})


def plain_method(
    name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Write a method call in the one form that it has in a graph."""
    if name in ("cpu", "cuda"):
        return "to", (args[0], torch.device("cpu")), {}
    if name == "type" and len(args) == 2 and not isinstance(args[1], str):
        return "to", args, kwargs
    if not name.startswith("__"):
        return name, args, kwargs
    name = name.replace("div__", "truediv__") if name in _OLD_DIVISIONS else name
    function = getattr(operator, name, None)
    if function is not None:
        return function, args, kwargs
    reflected = getattr(operator, f"__{name.removeprefix('__r')}", None)
    if name.startswith("__r") and reflected is not None:
        return reflected, args[::-1], kwargs
    return name, args, kwargs


def is_method(function: Any) -> bool:
    """Tell whether a function is a method of tensors; torch does not count new_zeros among them."""
    known: bool = torch.overrides.is_tensor_method_or_property(function)
    return known or isinstance(function, MethodDescriptorType)
