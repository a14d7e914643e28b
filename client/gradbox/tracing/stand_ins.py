"""What stands for functions of Python, torch and NumPy while a function is traced.

Each records a call on symbols, or refuses it, and calls what it stands for in every other case: for
whoever has no symbols, and for every other thread.
"""

from __future__ import annotations

import functools
import math
import random
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, Final

import torch
from torch.fx import Proxy

from gradbox.graphs import allow_list
from gradbox.tracing.current import TRACED
from gradbox.tracing.refusals import COMPILED, CUSTOM, instead_of
from gradbox.tracing.source_location import untraceable
from gradbox.tracing.symbols import length_of
from gradbox.tracing.type_tests import type_test

# What is replaced in torch's own namespace, which is too large to be searched for every loss.
OF_TORCH: Final = "empty finfo iinfo is_tensor ones rand randn zeros".split()


def generators() -> tuple[Any, ...]:
    """Return the modules whose functions draw from a generator of the whole process."""
    numpy = sys.modules.get("numpy")
    return (random, numpy.random) if numpy else (random,)


@functools.cache  # a fifth of the time of a trace; made again once NumPy is imported
def stand_ins(modules: tuple[Any, ...]) -> dict[int, Callable[..., Any]]:
    """Return, by the identity of what it replaces, a function that records calls on symbols.

    Each of them keeps what it replaces, so that no other object has its identity meanwhile.
    """
    originals = [getattr(math, name.removeprefix("math.")) for name in sorted(allow_list.MATH)]
    originals += [torch.finfo, torch.iinfo]
    found = {id(original): _recorded(original) for original in originals}
    found[id(len)] = _recorded_length(len)
    for original in (max, min):
        found[id(original)] = _recorded_extreme(original)
    for test in (isinstance, callable, torch.is_tensor):
        found[id(test)] = type_test(test)
    for factory in (torch.empty, torch.ones, torch.rand, torch.randn, torch.zeros):
        found[id(factory)] = _sized(factory)
    for module in modules:
        shared = module.random.__self__
        for draw in vars(module).values():
            if getattr(draw, "__self__", None) is shared:
                found[id(draw)] = _refuse_drawing(draw)
        if hasattr(module, "default_rng"):
            found[id(module.default_rng)] = _refuse_drawing(module.default_rng)
    return found


def stand_ins_of_methods() -> dict[tuple[type, str], Any]:
    """Return likewise, by class and name, what stands for methods.

    They are what a `random.Random` of the function's own draws by (NumPy's are refused when they
    are made), and the call of a custom autograd function.
    """
    found: dict[tuple[type, str], Any] = {
        (random.Random, name): _refuse_drawing(getattr(random.Random, name))
        for name in ("random", "getrandbits")
    }
    custom: Any = torch.autograd.Function
    found[custom, "apply"] = classmethod(_refuse_custom(vars(custom)["apply"]))
    return found


def _recorded(original: Callable[..., Any]) -> Callable[..., Any]:
    def record_or_call(*args: Any, **kwargs: Any) -> Any:
        recording = TRACED.recording
        if recording and any(isinstance(value, Proxy) for value in (*args, *kwargs.values())):
            return recording.create_proxy("call_function", original, args, kwargs)
        return original(*args, **kwargs)

    return record_or_call


def _recorded_length(original: Callable[..., int]) -> Callable[..., Any]:
    """Do what `_recorded` does, at less cost: torch asks for thousands of lengths in a trace."""

    def length(value: Any, /) -> Any:
        if issubclass(type(value), Proxy) and TRACED.recording:
            return length_of(value)
        return original(value)

    return length


def _recorded_extreme(original: Callable[..., Any]) -> Callable[..., Any]:
    """Let `max(n // 10, 1)` be recorded as the larger of two values, one after another."""

    def of_two(left: Any, right: Any) -> Any:
        recording: Any = TRACED.recording
        return recording.create_proxy("call_function", original, (left, right), {})

    def extreme(*values: Any, **kwargs: Any) -> Any:
        several = len(values) > 1 and not kwargs and TRACED.recording
        if several and any(issubclass(type(value), Proxy) for value in values):
            return functools.reduce(of_two, values)
        return original(*values, **kwargs)

    return extreme


def _sized(factory: Callable[..., Any]) -> Callable[..., Any]:
    """Let torch.zeros(n, d) take symbols for n and d as it takes them in a tuple."""

    def call(*size: Any, **kwargs: Any) -> Any:
        if len(size) > 1 and any(isinstance(value, Proxy) for value in size):
            return factory(size, **kwargs)
        return factory(*size, **kwargs)

    return call


def _refuse_drawing(draw: Callable[..., Any]) -> Callable[..., Any]:
    """Refuse a random number to a thread that traces, which would freeze it into the graph."""

    def call(*args: Any, **kwargs: Any) -> Any:
        if TRACED.recording and not _importing(sys._getframe(1)):
            # The first thing that a compiled function does is to save Python's random state.
            if sys._getframe(1).f_globals.get("__name__", "").startswith("torch._dynamo"):
                raise untraceable(*COMPILED)
            raise untraceable(
                f"{draw.__name__}() draws random numbers, which would be frozen into the graph",
                instead_of("rand"),
            )
        return draw(*args, **kwargs)

    return call


def _importing(frame: FrameType | None) -> bool:
    """Tell whether a module is being imported, whose numbers are not the function's."""
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False


def _refuse_custom(apply: Any) -> Callable[..., Any]:
    def refuse(cls: type, *args: Any, **kwargs: Any) -> Any:
        if any(isinstance(value, Proxy) for value in (*args, *kwargs.values())):
            raise untraceable(
                f"the custom autograd function {cls.__name__} would lose its backward",
                CUSTOM,
            )
        return apply.__get__(None, cls)(*args, **kwargs)

    return refuse
