"""Restores the registered model after a job.

A job sets flags, registers hooks, swaps data, and the model itself may rebind attributes. All of
that is put back, also after an error: what `model_state` finds, and of every tensor its data,
`requires_grad`, `.grad` and hooks; of buffers, of tensors that are plain attributes and of
embeddings with a `max_norm`, which a forward pass may overwrite, also the values.

A forward pass that writes to its other parameters is refused, by `written_parameters`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn

from gradbox_engine.model.state.model_state import AS_REGISTERED, ModelState
from gradbox_engine.model.state.mutables import MOST_BYTES
from gradbox_engine.model.tensor_equality import same_values
from gradbox_engine.torch_private import (
    buffers_of,
    hooks_after_accumulation,
    hooks_on_gradient,
    parameters_of,
)


class RegisteredState(NamedTuple):
    """What a model has when a job begins, each once, in the model's order."""

    state: ModelState
    modules: list[nn.Module]
    parameters: list[Tensor]
    buffers: list[Tensor]


@contextmanager
def restored(model: nn.Module) -> Iterator[RegisteredState]:
    """Put the model back on the way out, whatever happened inside; gives what it had.

    A device that refuses all work takes the model with it; then the error that says why goes on.
    """
    registered = ModelState(model)
    modules = [module for _, module in registered.modules]
    parameters, buffers = (_tensors(map(table, modules)) for table in (parameters_of, buffers_of))
    renormed_tables = renormed(modules)
    states = [_TensorState(p, with_value=id(p) in renormed_tables) for p in parameters]
    states += [_TensorState(b, with_value=True) for b in buffers]
    if registered.tensors:
        own = {id(value) for module in modules for value in vars(module).values()}
        known = {id(state.tensor) for state in states}
        states += [
            _TensorState(tensor, with_value=id(tensor) in own or _is_small_value(tensor))
            for tensor in registered.tensors
            if id(tensor) not in known and tensor.is_leaf and not tensor.is_inference()
        ]
    failed = True
    try:
        yield RegisteredState(registered, modules, parameters, buffers)
        failed = False
    finally:
        try:
            with torch.no_grad():
                for state in states:
                    state.restore()
        except torch.AcceleratorError:
            if not failed:
                raise
        registered.restore(AS_REGISTERED)


def _tensors(tables: Iterable[Mapping[str, Tensor | None]]) -> list[Tensor]:
    """Return the tensors that modules register in a table, each once."""
    tensors = (tensor for table in tables for tensor in table.values())
    return list({id(tensor): tensor for tensor in tensors if tensor is not None}.values())


def _is_small_value(tensor: Tensor) -> bool:
    """Return whether a tensor inside an object is copied for the job: a cache may be large."""
    return not isinstance(tensor, nn.Parameter) and tensor.nbytes <= MOST_BYTES


def renormed(modules: Iterable[nn.Module]) -> set[int]:
    """Return the ids of tables whose rows a look-up shortens in place, by `max_norm`."""
    kinds = (nn.Embedding, nn.EmbeddingBag)
    tables = (module for module in modules if isinstance(module, kinds))
    return {id(table.weight) for table in tables if table.max_norm is not None}


class _TensorState:
    """A parameter's or buffer's identity: which data it holds, its flags and its hooks."""

    __slots__ = ("_data", "_grad", "_hooks", "_later_hooks", "_requires_grad", "_value", "tensor")

    def __init__(self, tensor: Tensor, *, with_value: bool = False) -> None:
        self.tensor = tensor
        self._data = tensor.detach()
        self._value = self._data.clone() if with_value else None
        self._requires_grad = tensor.requires_grad
        self._grad = tensor.grad
        self._hooks = dict(hooks_on_gradient(tensor) or {})
        self._later_hooks = dict(hooks_after_accumulation(tensor) or {})

    def restore(self) -> None:
        """Put it back; to be called under `torch.no_grad`."""
        tensor = self.tensor
        if tensor.grad_fn is not None:
            tensor.detach_()
        tensor.grad = None
        tensor.data = self._data
        if self._value is not None and not same_values(self._data, self._value):
            self._data.copy_(self._value)
        tensor.requires_grad_(self._requires_grad)
        tensor.grad = self._grad
        for hooks, before in (
            (hooks_on_gradient(tensor), self._hooks),
            (hooks_after_accumulation(tensor), self._later_hooks),
        ):
            if hooks is not None and list(hooks) != list(before):
                hooks.clear()
                hooks.update(before)
