"""The registered model comes out of a job as it went in.

A job sets flags, hangs up hooks, swaps data, and the model itself may rebind attributes. All of
that is put back, also after an error: every attribute of every submodule, the entries of its dicts
(parameters, buffers, hooks), and of every tensor its data, `requires_grad`, `.grad` and hooks; of
buffers, which a forward pass overwrites, also the values.

Not covered: the inside of plain objects that a submodule holds (a list in a list, another
library's cache), and a forward pass that writes to its own parameters in place.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

NOTHING: tuple[()] = ()
TENSOR_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")


@contextmanager
def preserved(model: nn.Module) -> Iterator[None]:
    """Put the model back on the way out, whatever happened inside."""
    modules = [_ModuleState(module) for module in model.modules()]
    states = [_TensorState(tensor) for tensor in (*model.parameters(), *_plain_leaves(model))]
    states += [_TensorState(buffer, with_value=True) for buffer in model.buffers()]
    try:
        yield
    finally:
        for state in states:
            state.restore()
        for module_state in modules:
            module_state.restore()


def _plain_leaves(model: nn.Module) -> Iterator[Tensor]:
    """Yield tensors that collect gradients but are registered nowhere."""
    for module in model.modules():
        for value in vars(module).values():
            if isinstance(value, Tensor) and value.requires_grad and value.is_leaf:
                yield value


class _ModuleState:
    """A submodule's attributes, and the entries of those that are dicts, lists or sets."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._attributes = dict(vars(module))
        self._entries = {
            key: value.copy() if value else NOTHING  # as most are: hooks nobody has hung up
            for key, value in self._attributes.items()
            if isinstance(value, dict | list | set)
        }

    def restore(self) -> None:
        for key, entries in self._entries.items():
            _refill(self._attributes[key], entries)
        vars(self._module).clear()
        vars(self._module).update(self._attributes)


def _refill(container: Any, entries: Any) -> None:
    if not container and not entries:
        return
    container.clear()
    if isinstance(container, list):
        container.extend(entries)
    else:
        container.update(entries)


class _TensorState:
    """A parameter's or buffer's identity: which data it holds, and what hangs on it."""

    def __init__(self, tensor: Tensor, *, with_value: bool = False) -> None:
        self._tensor = tensor
        self._data = tensor.detach()
        self._value = self._data.clone() if with_value else None
        self._requires_grad = tensor.requires_grad
        self._grad = tensor.grad
        self._hooks = {name: dict(getattr(tensor, name) or NOTHING) for name in TENSOR_HOOKS}

    @torch.no_grad()
    def restore(self) -> None:
        tensor = self._tensor
        if tensor.grad_fn is not None:
            tensor.detach_()
        tensor.grad = None
        tensor.data = self._data
        if self._value is not None and not torch.equal(self._data, self._value):
            self._data.copy_(self._value)
        tensor.requires_grad_(self._requires_grad)
        tensor.grad = self._grad
        for name, entries in self._hooks.items():
            hooks = getattr(tensor, name)
            if hooks is not None:
                _refill(hooks, entries)
