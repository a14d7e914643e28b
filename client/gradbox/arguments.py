"""What a user is told of arguments that a call does not have, in place of Python's TypeError."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from functools import wraps
from inspect import Parameter
from typing import Any, TypeVar

from gradbox.errors import InvalidJob

Called = TypeVar("Called", bound=Callable[..., Any])


def explain_arguments(called: Called, *, options: type | None = None) -> Called:
    """Decorate a function, or the constructor of a class, to say which argument was meant.

    Args:
        options: the TypedDict of its keyword arguments beside those of its signature.

    Raises, where it is called:
        InvalidJob: an argument is misspelt, missing, or given by position where it goes by name.
    """
    if isinstance(called, type):
        called.__init__ = explain_arguments(called.__init__)  # type: ignore[misc]
        return called

    @wraps(called)
    def call(*args: Any, **kwargs: Any) -> Any:
        if options is not None:
            described = _parameters(called, options)
            if not {parameter.name for parameter in described}.issuperset(kwargs):
                raise InvalidJob(_mistake(called, described, args, kwargs))
        try:
            return called(*args, **kwargs)
        except TypeError as error:
            if error.__traceback__ is None or error.__traceback__.tb_next is not None:
                raise  # from within what was called
            described = _parameters(called, options)
            raise InvalidJob(_mistake(called, described, args, kwargs) or str(error)) from None

    return call  # type: ignore[return-value]


def _parameters(called: Callable[..., Any], options: type | None) -> list[Parameter]:
    """Return the parameters of a call, each option one of them."""
    parameters = [*inspect.signature(called).parameters.values()]
    if options is None:
        return parameters
    named = [
        Parameter(name, Parameter.KEYWORD_ONLY, default=None) for name in options.__annotations__
    ]
    return [p for p in parameters if p.kind is not Parameter.VAR_KEYWORD] + named


def _mistake(
    called: Callable[..., Any],
    parameters: list[Parameter],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> str:
    """Say what is wrong with the arguments of a call; "" if that is none of the usual mistakes."""
    if parameters[0].name == "self":
        parameters, args = parameters[1:], args[1:]
    places = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    named = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    options = any(p.kind is p.VAR_KEYWORD for p in parameters)
    unknown = [name for name in kwargs if name not in named and not options]
    needed = [p.name for p in parameters if p.default is p.empty and p.kind is not p.VAR_KEYWORD]
    missing = [name for name in needed if name not in kwargs and name not in places[: len(args)]]
    what = called.__qualname__.removesuffix(".__init__")
    bare = [str(p.replace(annotation=p.empty, default=p.empty)) for p in parameters]
    takes = f"it takes {', '.join(bare)}"
    if unknown:
        close = get_close_matches(unknown[0], named, n=1)
        hint = f"did you mean {close[0]!r}?" if close else takes
        return f"{what}: expected an argument that it has, got {unknown[0]!r}; {hint}"
    if len(args) > len(places):
        most = f"at most {len(places)}" if places else "no arguments"
        return f"{what}: expected {most} by position, got {len(args)}; write NAME=VALUE, {takes}"
    return f"{what}: expected {missing[0]!r}, got none; {takes}" if missing else ""
