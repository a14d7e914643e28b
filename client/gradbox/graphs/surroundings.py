"""The world around a function while it is traced: what is intercepted, and put back afterwards."""

from __future__ import annotations

import functools
import math
import random
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Final

import torch
from torch.fx import Proxy

from gradbox.errors import UntraceableLoss
from gradbox.graphs import allowed
from gradbox.graphs.location import untraceable
from gradbox.graphs.recording import Recording

_LOCK: Final = threading.RLock()


@contextmanager
def surroundings(function: Callable[..., Any], recording: Recording) -> Iterator[None]:
    """Let Python's own calls on symbols be recorded, and leave the function's module as it was.

    `math` functions, `torch.finfo` and the like are replaced for the duration by functions that
    behave as before for everybody without symbols, so other threads do not notice.

    Raises:
        UntraceableLoss: the function drew numbers from Python's or NumPy's random generator.
    """
    with _LOCK, ExitStack() as stack:
        stack.enter_context(torch.enable_grad())
        stack.enter_context(_without_randomness())
        for module in _modules(function):
            stack.enter_context(_restored(module))
        stack.enter_context(_intercepted(function, recording))
        yield


def tensors_of(function: Callable[..., Any]) -> dict[int, str]:
    """Return the names of the trainable parameters of the module behind a function."""
    root = _root(function)
    if root is None:
        return {}
    return {
        id(parameter): name
        for name, parameter in root.named_parameters()
        if parameter.requires_grad
    }


def _root(function: Callable[..., Any]) -> torch.nn.Module | None:
    while isinstance(function, functools.partial):
        function = function.func
    owner = getattr(function, "__self__", function)
    return owner if isinstance(owner, torch.nn.Module) else None


def _modules(function: Callable[..., Any]) -> list[torch.nn.Module]:
    root = _root(function)
    return [] if root is None else list(root.modules())


@contextmanager
def _restored(module: torch.nn.Module) -> Iterator[None]:
    """Put a module's attributes back, one level into its containers."""
    state = vars(module)
    before = dict(state)
    contents = {
        name: value.copy() for name, value in state.items() if isinstance(value, dict | list | set)
    }
    try:
        yield
    finally:
        state.clear()
        state.update(before)
        for name, copy in contents.items():
            kept = state[name]
            kept.clear()
            kept.extend(copy) if isinstance(kept, list) else kept.update(copy)


@contextmanager
def _without_randomness() -> Iterator[None]:
    numpy = sys.modules.get("numpy")
    python_before = random.getstate()
    numpy_before = str(numpy.random.get_state()) if numpy else None
    yield
    if random.getstate() != python_before or (
        numpy and str(numpy.random.get_state()) != numpy_before
    ):
        raise UntraceableLoss(
            "the function draws from Python's or NumPy's random generator, and the number would be "
            "frozen into the graph; draw it outside and pass it in loss_inputs"
        )


@contextmanager
def _intercepted(function: Callable[..., Any], recording: Recording) -> Iterator[None]:
    replaced = _replacements(recording)
    undo: list[tuple[dict[str, Any], str, Any]] = []
    for namespace in (vars(math), vars(torch), *_globals(function)):
        for name, value in list(namespace.items()):
            if id(value) in replaced:
                undo.append((namespace, name, value))
                namespace[name] = replaced[id(value)]
    custom: Any = torch.autograd.Function
    apply = vars(custom)["apply"]
    custom.apply = classmethod(_refuse_custom(apply))
    try:
        yield
    finally:
        custom.apply = apply
        for namespace, name, value in undo:
            namespace[name] = value


def _globals(function: Callable[..., Any]) -> list[dict[str, Any]]:
    """Return the namespaces in which the function's code may have imported names."""
    while isinstance(function, functools.partial):
        function = function.func
    code_owners = [function, *(type(module).forward for module in _modules(function))]
    found = {
        id(names): names
        for owner in code_owners
        if (names := getattr(owner, "__globals__", None)) is not None
    }
    return list(found.values())


def _replacements(recording: Recording) -> dict[int, Callable[..., Any]]:
    """Return, by the identity of what it replaces, a function that records calls on symbols."""
    originals = [getattr(math, name.removeprefix("math.")) for name in sorted(allowed.MATH)]
    originals += [torch.finfo, torch.iinfo]
    found = {id(original): _recorded(original, recording) for original in originals}
    for factory in (torch.zeros, torch.ones):
        found[id(factory)] = _sized(factory)
    return found


def _recorded(original: Callable[..., Any], recording: Recording) -> Callable[..., Any]:
    def record_or_call(*args: Any, **kwargs: Any) -> Any:
        if any(isinstance(value, Proxy) for value in (*args, *kwargs.values())):
            return recording.create_proxy("call_function", original, args, kwargs)
        return original(*args, **kwargs)

    return record_or_call


def _sized(factory: Callable[..., Any]) -> Callable[..., Any]:
    """Let torch.zeros(n, d) take symbols for n and d as it takes them in a tuple."""

    def call(*size: Any, **kwargs: Any) -> Any:
        if len(size) > 1 and any(isinstance(value, Proxy) for value in size):
            return factory(size, **kwargs)
        return factory(*size, **kwargs)

    return call


def _refuse_custom(apply: Any) -> Callable[..., Any]:
    def refuse(cls: type, *args: Any, **kwargs: Any) -> Any:
        if any(isinstance(value, Proxy) for value in (*args, *kwargs.values())):
            raise untraceable(
                f"the custom autograd function {cls.__name__} would lose its backward",
                "write the formula so that autograd differentiates it, with .detach() where the "
                "gradient must not flow",
            )
        return apply.__get__(None, cls)(*args, **kwargs)

    return refuse
