"""Where in the user's own code something happened while a function was traced."""

from __future__ import annotations

import linecache
import sys
from collections.abc import Iterable
from pathlib import Path
from types import FrameType, TracebackType

import torch

from gradbox.errors import UntraceableLoss, is_library

_OURS = f"{Path(__file__).parents[1]}/"  # the client, whose losses are no user's code either
_TORCH = f"{Path(torch.__file__).parent}/"

_Call = tuple[FrameType, int]
"""A frame, and the line of it that runs."""


def untraceable(what: str, instead: str) -> UntraceableLoss:
    """Return an error that names the line of the user's code that is running now.

    Args:
        what: what cannot be traced.
        instead: what the user can do about it.
    """
    return UntraceableLoss(f"{current_line()}{what}; {instead}")


def current_line() -> str:
    """Describe the line of user code that is running; empty when there is none."""
    calls: list[_Call] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        calls.append((frame, frame.f_lineno))
        frame = frame.f_back
    return _describe(calls)


def raised_line(traceback: TracebackType | None) -> str:
    """Describe the line of user code that raised; empty when there is none."""
    calls: list[_Call] = []
    while traceback is not None:
        calls.insert(0, (traceback.tb_frame, traceback.tb_lineno))
        traceback = traceback.tb_next
    return _describe(calls)


def brief_location(frame: FrameType) -> str:
    """Return file and line of a frame, and what stands there; at most 200 characters."""
    filename, line = frame.f_code.co_filename, frame.f_lineno
    source = linecache.getline(filename, line).strip()[:120]
    return f"{Path(filename).name[-60:]}:{line}{f': {source}' if source else ''}"


def is_user_code(filename: str) -> bool:
    """Tell whether a file is neither torch's nor the client's own."""
    return not filename.startswith((_OURS, _TORCH, "<frozen"))


def _describe(calls: list[_Call]) -> str:
    """Describe the innermost line of the user's own, and where in a library it led to.

    Args:
        calls: from the innermost on.
    """
    lines = [(frame.f_code.co_filename, line) for frame, line in calls]
    lines = [line for line in lines if is_user_code(line[0])]
    if not lines:
        return ""
    own = next((line for line in lines if not is_library(line[0])), lines[0])
    source = linecache.getline(*own).strip()
    found = f"{own[0]}:{own[1]}: {f'`{source}`: ' if source else ''}"
    if own is not lines[0]:
        found += f"in {'/'.join(Path(lines[0][0]).parts[-2:])}:{lines[0][1]}: "
    return found + _module_of_torch(frame for frame, _ in calls)


def _module_of_torch(frames: Iterable[FrameType]) -> str:
    """Name the innermost module of torch's own that the user's line led to, if it led to one."""
    for frame in frames:
        if is_user_code(frame.f_code.co_filename):
            return ""
        kind = type(frame.f_locals.get("self"))
        if issubclass(kind, torch.nn.Module) and kind.__module__.startswith("torch.nn."):
            return f"nn.{kind.__name__}: "
    return ""
