"""What a user is told of a call that raised: its arguments, where it happened, and what may help.

The message holds names, dtypes, shapes, one line of the model's code, and the range of integer
arguments where that is what is wrong. It holds no other values and no paths.
"""

from __future__ import annotations

import linecache
from collections.abc import Iterator, Mapping
from pathlib import PurePath
from types import FrameType, TracebackType
from typing import Any, Final

from torch import Tensor, nn

from gradbox_engine.model.failure_hints import hint

# Packages whose lines say nothing of the model.
_INFRASTRUCTURE: Final = frozenset({"torch", "gradbox", "gradbox_engine", "gradbox_worker"})
_SHOWN_ARGUMENTS: Final = 20
_LONGEST_LINE: Final = 160


def describe(
    error: Exception,
    trace: TracebackType | None,
    *,
    model: nn.Module | None,
    arguments: Mapping[str, Any],
) -> str:
    """Return lines that stand under an error's own message; empty if nothing is known."""
    frames = list(_frames(trace))
    name, module = _raising_submodule(frames, model)
    lines = []
    if arguments:
        lines.append(f"arguments: {', '.join(_listed(arguments))}")
    if module is not None:
        lines.append(f"submodule: {name or 'the model itself'} ({type(module).__name__})")
    if (line := _last_line(frames)) is not None:
        lines.append(f"line: {line}")
    lines += getattr(error, "__notes__", ())
    if (advice := hint(error, model=model, module=module, arguments=arguments)) is not None:
        lines.append(f"hint: {advice}")
    return "".join(f"\n  {line}" for line in lines)


def _frames(trace: TracebackType | None) -> Iterator[tuple[FrameType, int]]:
    while trace is not None:
        yield trace.tb_frame, trace.tb_lineno
        trace = trace.tb_next


def _raising_submodule(
    frames: list[tuple[FrameType, int]], model: nn.Module | None
) -> tuple[str, nn.Module | None]:
    """Return the innermost module of the model that was being called, with its name."""
    if model is None:
        return "", None
    names = {id(module): name for name, module in model.named_modules()}
    for frame, _ in reversed(frames):
        owner = frame.f_locals.get("self")
        if isinstance(owner, nn.Module) and id(owner) in names:
            return names[id(owner)], owner
    return "", None


def _last_line(frames: list[tuple[FrameType, int]]) -> str | None:
    """Return the innermost line that is neither torch's nor gradbox's."""
    for frame, number in reversed(frames):
        package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if package in _INFRASTRUCTURE or package == "contextlib":
            continue
        path = frame.f_code.co_filename
        source = linecache.getline(path, number).strip()[:_LONGEST_LINE]
        return f"{PurePath(path).name}:{number}{f': {source}' if source else ''}"
    return None


def _listed(arguments: Mapping[str, Any]) -> list[str]:
    named = [f"{_name(name)} {_form(value)}" for name, value in arguments.items()]
    left = len(named) - _SHOWN_ARGUMENTS
    return named[:_SHOWN_ARGUMENTS] + ([f"and {left} more"] if left > 0 else [])


def _name(name: str) -> str:
    return f"argument {name}" if name.isdigit() else name


def _form(value: Any) -> str:
    if isinstance(value, Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        return f"{dtype} {tuple(value.shape)}"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{name}: {_form(item)}" for name, item in value.items()) + "}"
    plain = isinstance(value, bool | int | float | str | None)
    return repr(value)[:50] if plain else type(value).__name__
