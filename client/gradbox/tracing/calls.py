"""A call of torch in the one form that it has in a graph, whatever Python called.

`z.cpu()` is a move to the job's device; `1 - z` calls `__rsub__`, which is an operator with its
operands exchanged; dropout that drops nothing is its argument; a dtype may be given as a type of
Python's or an old tensor type.

An operation may have torch's default dtype, which the author may have changed; the box has float32,
and is told. Not seen, because a symbol has no dtype: what an operation turns into floats by itself
(`n / 2` of an integer tensor, its `sqrt()`, `torch.where` of two numbers).
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Mapping, Sequence
from types import MethodDescriptorType
from typing import Any, Final

import torch
import torch.nn.functional as F

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


_DROPOUTS: Final[tuple[Callable[..., Any], ...]] = (
    F.dropout,
    F.dropout1d,
    F.dropout2d,
    F.dropout3d,
    F.alpha_dropout,
    F.feature_alpha_dropout,
)


def drops_nothing(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> bool:
    """Tell whether a call is one of dropout in eval mode, or with probability 0."""
    if func not in _DROPOUTS:
        return False
    bound = inspect.signature(func).bind(*args, **kwargs)
    bound.apply_defaults()
    return not bound.arguments["training"] or bound.arguments["p"] == 0


# What torch makes of Python's types where it takes a dtype.
_TYPES_OF_PYTHON: Final[dict[type, torch.dtype]] = {
    bool: torch.bool,
    int: torch.int64,
    float: torch.float64,
    complex: torch.complex128,
}
_ALWAYS: Final = frozenset(
    """
    bartlett_window blackman_window eye fft_fftfreq fft_rfftfreq hamming_window hann_window
    kaiser_window linspace logspace ones scalar_tensor zeros
    """.split()
)
_OF_FLOATS: Final = frozenset({"arange", "full"})


def dtype_meant(value: Any) -> Any:
    """Return the dtype for which torch takes a type, `bool` or `torch.FloatTensor`; else itself."""
    if isinstance(value, type(torch.FloatTensor)):
        return value.dtype
    return _TYPES_OF_PYTHON.get(value, value) if isinstance(value, type) else value


def with_default_dtype(
    name: str, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Mapping[str, Any]:
    """Say the dtype in a call of torch whose result has torch's default dtype, as it is here."""
    takes_it = name in _ALWAYS or (name in _OF_FLOATS and _floats([*args, *kwargs.values()]))
    if torch.get_default_dtype() == torch.float32 or not takes_it or "dtype" in kwargs:
        return kwargs
    return {**kwargs, "dtype": torch.get_default_dtype()}


def _floats(values: Sequence[Any]) -> bool:
    return any(isinstance(value, float) for value in values)
