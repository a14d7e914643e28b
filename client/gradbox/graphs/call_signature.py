"""Which arguments a function takes, and whether those that are given fit."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from itertools import chain, count, islice
from typing import Any

import torch

from gradbox.errors import InvalidInputs

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def bound_names(
    function: Callable[..., Any], positional: int, keywords: Sequence[str], options: Sequence[str]
) -> tuple[str, ...]:
    """Return the function's own names of the arguments given by position.

    Raises:
        InvalidInputs: it does not take these arguments, or lacks one.
    """
    if not callable(function):
        raise InvalidInputs(
            f"a function or an nn.Module was expected, got {type(function).__name__}"
        )
    signature = _signature(function)
    if signature is None:
        return _invented(positional, keywords)
    given = dict.fromkeys((*keywords, *options))
    try:
        signature.bind(*[None] * positional, **given)
    except TypeError as error:
        raise InvalidInputs(_explain(function, signature, positional, given, error)) from None
    names = tuple(
        parameter.name
        for parameter in signature.parameters.values()
        if parameter.kind in _POSITIONAL
    )[:positional]
    return (*names, *_invented(positional - len(names), (*names, *given)))


def _signature(function: Callable[..., Any]) -> inspect.Signature | None:
    target = function.forward if isinstance(function, torch.nn.Module) else function
    try:
        return inspect.signature(target)
    except ValueError:  # a builtin of torch's
        return None


def _invented(num: int, taken: Sequence[str]) -> tuple[str, ...]:
    """Return so many names out of z, z_1, z_2, … that are not taken."""
    candidates = chain(["z"], (f"z_{index}" for index in count(1)))
    return tuple(islice((name for name in candidates if name not in taken), num))


def _explain(
    function: Callable[..., Any],
    signature: inspect.Signature,
    positional: int,
    given: Sequence[str] | dict[str, None],
    error: TypeError,
) -> str:
    name = getattr(function, "__name__", type(function).__name__)
    by_position = f"{positional} by position" if positional else "none by position"
    by_name = ", ".join(given) or "none"
    return (
        f"{name} takes {signature}, and it is given {by_position} and by name: {by_name} ({error})"
    )
