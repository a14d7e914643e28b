"""Dtypes that torch takes from elsewhere: its default dtype, Python's types, its old tensor types.

An operation may have torch's default dtype, which the author may have changed; the box has float32.
Not seen, because a symbol has no dtype: integers that an operation turns into
floats (`n / 2` of an integer tensor, its `sqrt()`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch

from gradbox.tracing.source_location import untraceable

# What torch makes of Python's types where it takes a dtype.
_TYPES_OF_PYTHON: Final[dict[type, torch.dtype]] = {
    bool: torch.bool,
    int: torch.int64,
    float: torch.float64,
    complex: torch.complex128,
}
_ALWAYS: Final = frozenset(
    """
    bartlett_window blackman_window eye fft_fftfreq fft_rfftfreq full hamming_window hann_window
    kaiser_window linspace logspace ones scalar_tensor zeros
    """.split()
)
_OF_FLOATS: Final = frozenset({"arange"})


def dtype_meant(value: Any) -> Any:
    """Return the dtype for which torch takes a type, `bool` or `torch.FloatTensor`; else itself."""
    if isinstance(value, type(torch.FloatTensor)):
        return value.dtype
    return _TYPES_OF_PYTHON.get(value, value) if isinstance(value, type) else value


def check_default_dtype(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Refuse a call of torch whose result would have another dtype on the box.

    Raises:
        UntraceableLoss: the default dtype is not float32, and the call says no dtype.
    """
    if torch.get_default_dtype() == torch.float32 or kwargs.get("dtype") is not None:
        return
    if name in _ALWAYS or (name in _OF_FLOATS and _floats([*args, *kwargs.values()])):
        instead = "give it a dtype, such as dtype=z.dtype"
    elif name == "where" and len(args) == 3 and _floats(args[1:]) and _numbers(args[1:]):
        instead = "make one of the two values a tensor with a dtype"
    else:
        return
    raise untraceable(
        f"torch.{name.replace('fft_', 'fft.')} takes torch's default dtype, "
        f"{torch.get_default_dtype()} here and torch.float32 on the box",
        instead,
    )


def _floats(values: Sequence[Any]) -> bool:
    return any(isinstance(value, float) for value in values)


def _numbers(values: Sequence[Any]) -> bool:
    return all(isinstance(value, int | float) for value in values)
