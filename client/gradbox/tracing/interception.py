"""What is replaced around a function while it is traced, and put back afterwards."""

from __future__ import annotations

import builtins
import functools
import math
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Final

import torch

from gradbox.tracing.current import TRACED
from gradbox.tracing.module_state import restored, submodules
from gradbox.tracing.recording import Recording
from gradbox.tracing.replacing import methods_replaced, names_replaced
from gradbox.tracing.stand_ins import OF_TORCH, generators, stand_ins, stand_ins_of_methods
from gradbox.tracing.torch_modules.table import recorded_modules

_LOCK: Final = threading.RLock()


@contextmanager
def intercepting(function: Callable[..., Any], recording: Recording) -> Iterator[None]:
    """Let what has no hook for symbols be recorded, and leave everything as it was.

    `math` functions, `len`, `torch.finfo`, random numbers and the like are replaced in their own
    modules and in those of the function, which may have imported them by name.
    """
    drawing = generators()
    instead = stand_ins(drawing)
    with _LOCK, ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(TRACED.by(recording))
        stack.enter_context(restored(function))
        stack.enter_context(names_replaced(vars(torch), instead, names=OF_TORCH))
        for module in (builtins, math, *drawing):
            stack.enter_context(names_replaced(vars(module), instead))
        for namespace in _globals(function):
            stack.enter_context(names_replaced(namespace, instead))
        stack.enter_context(methods_replaced(stand_ins_of_methods()))
        stack.enter_context(recorded_modules())
        yield


def _globals(function: Callable[..., Any]) -> list[dict[str, Any]]:
    """Return the namespaces in which the function's code may have imported names."""
    code_owners = [*_wrapped(function), *(type(module).forward for module in submodules(function))]
    found = {
        id(names): names
        for owner in code_owners
        if (names := getattr(owner, "__globals__", None)) is not None
    }
    return list(found.values())


def _wrapped(function: Any) -> Iterator[Any]:
    """Yield a function and those that it stands for: under partial, a decorator or a class."""
    seen: set[int] = set()
    while id(function) not in seen:
        seen.add(id(function))
        yield function
        if isinstance(function, functools.partial):
            function = function.func
        elif hasattr(function, "__wrapped__"):
            function = function.__wrapped__
        elif not hasattr(function, "__globals__") and not isinstance(function, torch.nn.Module):
            function = type(function).__call__
