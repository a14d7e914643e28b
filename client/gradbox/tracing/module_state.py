"""The nn.Module behind a traced function: what it holds, and what the function does to it.

Tracing leaves the module as it was. What the function put in place of a buffer (`self.mean = …`)
becomes a write into that buffer in the graph, so that the box gives it back.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from gradbox.tracing.recording import Recording


def trainable_parameters(function: Callable[..., Any]) -> dict[str, torch.nn.Parameter]:
    """Return the trainable parameters of the module behind a function, by name."""
    module = _module(function)
    if module is None:
        return {}
    return {name: p for name, p in module.named_parameters() if p.requires_grad}


def buffers(function: Callable[..., Any]) -> dict[str, torch.Tensor]:
    """Return the buffers of the module behind a function, by name."""
    module = _module(function)
    return {} if module is None else dict(module.named_buffers())


def submodules(function: Callable[..., Any]) -> list[torch.nn.Module]:
    """Return the module behind a function and all modules in it; none of a plain function."""
    module = _module(function)
    return [] if module is None else list(module.modules())


def _module(function: Callable[..., Any]) -> torch.nn.Module | None:
    while isinstance(function, functools.partial):
        function = function.func
    owner = getattr(function, "__self__", function)
    return owner if isinstance(owner, torch.nn.Module) else None


@contextmanager
def restored(function: Callable[..., Any]) -> Iterator[None]:
    """Put the attributes of a function's modules back, one level into their containers."""
    with ExitStack() as stack:
        for module in submodules(function):
            stack.enter_context(_restored(module))
        yield


@contextmanager
def _restored(module: torch.nn.Module) -> Iterator[None]:
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


def write_replaced_buffers(
    recording: Recording, before: Mapping[str, torch.Tensor], after: Mapping[str, Any]
) -> None:
    """Record a write into each buffer that the function put another tensor in place of.

    To be called while calls into torch are recorded.

    Args:
        before: the buffers before the function was called, by name.
        after: what is in their places now.
    """
    replaced = [name for name, buffer in before.items() if after.get(name, buffer) is not buffer]
    values = {name: after[name].detach().clone() for name in replaced}
    for name, value in values.items():
        buffer = before[name]
        _read_a_copy(recording, buffer)
        message = f"the loss gives its buffer {name} another size than {tuple(buffer.shape)}"
        torch._assert(value.numel() == buffer.numel(), message)  # type: ignore[no-untyped-call]
        buffer.copy_(value)


def _read_a_copy(recording: Recording, buffer: torch.Tensor) -> None:
    """Let all that was recorded read a copy, which a write into the buffer leaves alone.

    Autograd may have kept what was read, and would refuse a graph whose tensors changed.
    """
    read = recording.create_arg(buffer)
    with recording.graph.inserting_after(read):
        copy = recording.graph.call_method("clone", (read,))
    read.replace_all_uses_with(copy, delete_user_cb=lambda user: user is not copy)
