"""Where in the user's own code something happened while a function was traced."""

from __future__ import annotations

import linecache
import sys
from pathlib import Path
from types import FrameType, TracebackType

import torch

from gradbox.errors import UntraceableLoss

_OURS = f"{Path(__file__).parents[1]}/"  # the client, whose losses are no user's code either
_TORCH = f"{Path(torch.__file__).parent}/"


def untraceable(what: str, instead: str) -> UntraceableLoss:
    """Return an error that names the line of the user's code that is running now.

    Args:
        what: what cannot be traced.
        instead: what the user can do about it.
    """
    return UntraceableLoss(f"{current_line()}{what}; {instead}")


def current_line() -> str:
    """Describe the innermost frame of user code that is running; empty when there is none."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if is_user_code(frame.f_code.co_filename):
            return _describe(frame.f_code.co_filename, frame.f_lineno)
        frame = frame.f_back
    return ""


def raised_line(traceback: TracebackType | None) -> str:
    """Describe the innermost line of user code in a traceback; empty when there is none."""
    found = ""
    while traceback is not None:
        filename = traceback.tb_frame.f_code.co_filename
        if is_user_code(filename):
            found = _describe(filename, traceback.tb_lineno)
        traceback = traceback.tb_next
    return found


def brief_location(frame: FrameType) -> str:
    """Return file and line of a frame, and what stands there; at most 200 characters."""
    filename, line = frame.f_code.co_filename, frame.f_lineno
    source = linecache.getline(filename, line).strip()[:120]
    return f"{Path(filename).name[-60:]}:{line}{f': {source}' if source else ''}"


def is_user_code(filename: str) -> bool:
    """Tell whether a file is neither torch's nor the client's own."""
    return not filename.startswith((_OURS, _TORCH, "<frozen"))


def _describe(filename: str, line: int) -> str:
    source = linecache.getline(filename, line).strip()
    return f"{filename}:{line}: {f'`{source}`: ' if source else ''}"
