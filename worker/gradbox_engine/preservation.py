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
CONTAINERS = (dict, list, set)
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
    """A submodule's attributes, and the entries of those that are dicts, lists or sets.

    Most of these are empty, hooks that nobody has hung up: no note is kept of them.
    """

    __slots__ = ("_attributes", "_entries", "_module")

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._attributes = vars(module).copy()
        self._entries = {
            key: value.copy()
            for key, value in self._attributes.items()
            if isinstance(value, CONTAINERS) and value
        }

    def restore(self) -> None:
        for key, value in self._attributes.items():
            if isinstance(value, CONTAINERS):
                _refill(value, self._entries.get(key, NOTHING))
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

    __slots__ = ("_data", "_grad", "_hooks", "_requires_grad", "_tensor", "_value")

    def __init__(self, tensor: Tensor, *, with_value: bool = False) -> None:
        self._tensor = tensor
        self._data = tensor.detach()
        self._value = self._data.clone() if with_value else None
        self._requires_grad = tensor.requires_grad
        self._grad = tensor.grad
        hung_up = (getattr(tensor, name) for name in TENSOR_HOOKS)
        self._hooks = tuple(dict(hooks) if hooks else NOTHING for hooks in hung_up)

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
        for name, entries in zip(TENSOR_HOOKS, self._hooks, strict=True):
            hooks = getattr(tensor, name)
            if hooks is not None:
                _refill(hooks, entries)
