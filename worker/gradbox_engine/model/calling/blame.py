"""Whose error it is, when a job calls code that is not the engine's.

The message holds names, dtypes, shapes, and one line of the model's code; no values and no paths.
What may help is for whoever tells the user, who finds in the error what was called with what.
"""

from __future__ import annotations

import linecache
from collections.abc import Iterator, Mapping
from pathlib import PurePath
from types import FrameType, TracebackType
from typing import Any, Final

import torch
from torch import Tensor, nn

from gradbox_engine.errors import EngineError, FailedCall, ModelCallFailed

# Packages whose lines say nothing of the model.
_INFRASTRUCTURE: Final = frozenset({"torch", "gradbox", "gradbox_engine", "gradbox_worker"})
_SHOWN_ARGUMENTS: Final = 20
_LONGEST_LINE: Final = 160

OUT_OF_MEMORY_TEXTS = (
    "can't allocate memory",
    "DefaultCPUAllocator: not enough memory",
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "MPS backend out of memory",
    "std::bad_alloc",
)
"""How torch's CPU allocator and the libraries below torch say it, in plain RuntimeErrors."""


def is_out_of_memory(error: BaseException | None) -> bool:
    """Return whether memory ran out: not all of torch raises an OutOfMemoryError for that."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(
        text in str(error) for text in OUT_OF_MEMORY_TEXTS
    )


class blaming:  # noqa: N801 - reads as a phrase: with blaming("the model", "shard 3")
    """Turn what foreign code raises into ModelCallFailed, which says where it was called.

    The engine's own errors pass unchanged. Running out of memory becomes torch.OutOfMemoryError,
    whatever the device.

    Args:
        model: whose submodule the message names.
        arguments: what was called with, by name; the message has dtypes and shapes.
    """

    def __init__(
        self,
        what: str,
        where: str,
        *,
        model: nn.Module | None = None,
        arguments: Mapping[str, Any] | None = None,
    ) -> None:
        self._what = what
        self._where = where
        self._model = model
        self._arguments = arguments or {}

    def __enter__(self) -> None:
        pass

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None or isinstance(error, EngineError | torch.OutOfMemoryError):
            return
        if is_out_of_memory(error):
            raise torch.OutOfMemoryError(f"{self._where}: {self._what}: {error}") from error
        if isinstance(error, Exception):
            frames = list(_frames(trace))
            name, module = _raising_submodule(frames, self._model)
            details = "".join(
                f"\n  {line}" for line in _details(error, frames, self._arguments, name, module)
            )
            raise ModelCallFailed(
                f"{self._where}: {self._what} raised {type(error).__name__}: {error}{details}",
                call=FailedCall(self._model, module, self._arguments),
            ) from error


def _details(
    error: Exception,
    frames: list[tuple[FrameType, int]],
    arguments: Mapping[str, Any],
    name: str,
    module: nn.Module | None,
) -> Iterator[str]:
    """Return lines that stand under the error's own message; none if nothing is known."""
    if arguments:
        yield f"arguments: {', '.join(_listed(arguments))}"
    if module is not None:
        yield f"submodule: {name or 'the model itself'} ({type(module).__name__})"
    if (line := _last_line(frames)) is not None:
        yield f"line: {line}"
    yield from getattr(error, "__notes__", ())


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
    named = [f"{argument_name(name)} {_form(value)}" for name, value in arguments.items()]
    left = len(named) - _SHOWN_ARGUMENTS
    return named[:_SHOWN_ARGUMENTS] + ([f"and {left} more"] if left > 0 else [])


def argument_name(name: str) -> str:
    """Return how a message calls an argument: one by position has a number for a name."""
    return f"argument {name}" if name.isdigit() else name


def _form(value: Any) -> str:
    if isinstance(value, Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        return f"{dtype} {tuple(value.shape)}"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{name}: {_form(item)}" for name, item in value.items()) + "}"
    plain = isinstance(value, bool | int | float | str | None)
    return repr(value)[:50] if plain else type(value).__name__
