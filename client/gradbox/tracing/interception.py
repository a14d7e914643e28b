"""What surrounds a function while it is traced: stand-ins for what Python offers no hook for.

Each stand-in records a call on symbols, or refuses it, and calls what it stands for in every other
case: for whoever has no symbols, and for every other thread (`TRACED` says what this thread
records). They are put in place of `len`, `isinstance`, `math` functions, `torch.finfo`, random
numbers and the like, in their own modules and in those of the function, which may have imported
them by name; afterwards everything is put back.
"""

from __future__ import annotations

import builtins
import functools
import math
import random
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final, get_args

import torch
from torch.fx import Proxy

from gradbox.graphs import allow_list
from gradbox.tracing.current import TRACED
from gradbox.tracing.module_state import restored, submodules
from gradbox.tracing.recording import Recording
from gradbox.tracing.refusals import COMPILED, CUSTOM, instead_of
from gradbox.tracing.source_location import is_user_code, untraceable
from gradbox.tracing.symbols import length_of, passing_truth
from gradbox.tracing.torch_modules import recorded_modules


@contextmanager
def names_replaced(
    namespace: dict[str, Any],
    instead: Mapping[int, Callable[..., Any]],
    *,
    names: Iterable[str] | None = None,
) -> Iterator[None]:
    """Replace the functions of a module that have a stand-in.

    Args:
        namespace: the module's names.
        instead: the stand-ins, by the identity of what each stands for.
        names: where to look; everywhere by default.
    """
    searched = namespace.copy() if names is None else {name: namespace[name] for name in names}
    before = {name: value for name, value in searched.items() if id(value) in instead}
    namespace.update({name: instead[id(value)] for name, value in before.items()})
    try:
        yield
    finally:
        namespace.update(before)


@contextmanager
def methods_replaced(instead: Mapping[tuple[type, str], Any]) -> Iterator[None]:
    """Replace methods, named by class and name."""
    before = [(kind, name, vars(kind).get(name)) for kind, name in instead]
    for (kind, name), method in instead.items():
        setattr(kind, name, method)
    try:
        yield
    finally:
        for kind, name, own in before:  # None where it was inherited
            setattr(kind, name, own) if own is not None else delattr(kind, name)


# Its code asks in order to give numbers the dtype of the tensors beside them.
_DISTRIBUTIONS: Final = str(Path(torch.distributions.__file__).parent)


def type_test(known: Callable[..., bool]) -> Callable[..., bool]:
    """Stand for `isinstance`, which would say False of a symbol whatever it stands for.

    And for `callable`, which would say True. Torch's own code asks it of symbols as well, and is
    answered. An argument is a tensor. So, for all that can be known, is what a check takes for one
    that raises otherwise.
    """

    def test(value: Any, *kinds: Any) -> bool:
        if not issubclass(type(value), Proxy):
            return known(value, *kinds)
        asked_by = sys._getframe(1)
        filename = asked_by.f_code.co_filename
        if not is_user_code(filename):
            answered = filename.startswith(_DISTRIBUTIONS) and _of_a_tensor(known, *kinds)
            return answered or known(value, *kinds)
        of_tensor = _of_a_tensor(known, *kinds)
        if of_tensor is not None and _is_argument(value):
            return of_tensor
        if of_tensor and passing_truth(asked_by, called=True):
            return True
        raise untraceable(
            f"{known.__name__}() asks for the type of a value that is not known yet",
            "decide outside the function, or by an argument with a Python value",
        )

    return test


def _is_argument(symbol: Any) -> bool:
    return symbol.node.op == "placeholder" and not symbol.tracer.structured


def _of_a_tensor(known: Callable[..., bool], kinds: Any = None) -> bool | None:
    """Return the answer for a tensor; None if it depends on its dtype or class."""
    if known.__name__ == "is_tensor":
        return True
    if known.__name__ != "isinstance":
        return None
    if issubclass(torch.Tensor, kinds):
        return True
    narrower = (type(torch.LongTensor), type(torch.nn.Parameter))
    listed = kinds if isinstance(kinds, tuple) else get_args(kinds) or (kinds,)
    return None if any(isinstance(kind, narrower) for kind in listed) else False


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


@functools.cache
def _names_in(module: Any, modules: tuple[Any, ...]) -> list[str]:
    """Return under which names a module has what `stand_ins` stand for: none of them is rebound."""
    instead = stand_ins(modules)
    return [name for name, value in vars(module).items() if id(value) in instead]


@functools.cache
def stand_ins_of_methods() -> dict[tuple[type, str], Any]:
    """Return likewise, by class and name, what stands for methods.

    They are what a `random.Random` of the function's own draws by (NumPy's are refused when they
    are made), the call of a custom autograd function, and what torch's own modules do.
    """
    found: dict[tuple[type, str], Any] = {
        (random.Random, name): _refuse_drawing(getattr(random.Random, name))
        for name in ("random", "getrandbits")
    }
    custom: Any = torch.autograd.Function
    found[custom, "apply"] = classmethod(_refuse_custom(vars(custom)["apply"]))
    return found | recorded_modules()


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
        if TRACED.recording:
            # The first thing that a compiled function does is to save Python's random state.
            if sys._getframe(1).f_globals.get("__name__", "").startswith("torch._dynamo"):
                raise untraceable(*COMPILED)
            raise untraceable(
                f"{draw.__name__}() draws random numbers, which would be frozen into the graph",
                instead_of("rand"),
            )
        return draw(*args, **kwargs)

    return call


def _refuse_custom(apply: Any) -> Callable[..., Any]:
    def refuse(cls: type, *args: Any, **kwargs: Any) -> Any:
        if any(isinstance(value, Proxy) for value in (*args, *kwargs.values())):
            raise untraceable(
                f"the custom autograd function {cls.__name__} would lose its backward",
                CUSTOM,
            )
        return apply.__get__(None, cls)(*args, **kwargs)

    return refuse


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
            names = _names_in(module, drawing)
            stack.enter_context(names_replaced(vars(module), instead, names=names))
        for namespace in _globals(function):
            stack.enter_context(names_replaced(namespace, instead))
        stack.enter_context(methods_replaced(stand_ins_of_methods()))
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
