"""Restores the registered model after a job.

A job sets flags, registers hooks, swaps data, and the model itself may rebind attributes. All of
that is put back, also after an error: every attribute of every submodule, the entries of its dicts
(parameters, buffers, hooks), and of every tensor its data, `requires_grad`, `.grad` and hooks; of
buffers, of tensors that are plain attributes and of embeddings with a `max_norm`, which a forward
pass may overwrite, also the values. What lies inside the attributes is put back by `objects`,
tensors there too, up to 16 MiB each.

A forward pass that writes to its other parameters is refused, by `written_parameters`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from gradbox_engine.model.state.containers import CONTAINERS, entries_of, refill
from gradbox_engine.model.state.mutables import MOST_BYTES
from gradbox_engine.model.state.objects import Objects
from gradbox_engine.model.state.scripted import bind, scripted_attributes
from gradbox_engine.model.tensor_equality import same_values

NONE: list[Any] = []  # the entries of what is empty


@contextmanager
def restored(model: nn.Module) -> Iterator[list[Tensor]]:
    """Put the model back on the way out, whatever happened inside; gives its parameters.

    A device that refuses all work takes the model with it; then the error that says why goes on.
    """
    modules = [_ModuleState(module) for module in model.modules()]
    objects = Objects(model.named_modules())
    parameters = _registered(modules, "_parameters")
    buffers = _registered(modules, "_buffers")
    plain = [tensor for state in modules for tensor in state.plain_tensors]
    known = set(map(id, (*parameters, *buffers, *plain)))
    inside = [t for t in objects.tensors if id(t) not in known and _is_own(t)]
    tables = renormed(state.module for state in modules)
    states = [_TensorState(p, with_value=id(p) in tables) for p in parameters]
    states += [_TensorState(tensor, with_value=True) for tensor in (*buffers, *plain)]
    states += [_TensorState(tensor, with_value=_is_small_value(tensor)) for tensor in inside]
    failed = True
    try:
        yield parameters
        failed = False
    finally:
        try:
            with torch.no_grad():
                for state in states:
                    state.restore()
        except torch.AcceleratorError:
            if not failed:
                raise
        for module_state in modules:
            module_state.restore()
        objects.restore(None)


def _registered(modules: list[_ModuleState], table: str) -> list[Tensor]:
    """Return the tensors that modules register in a table, each once."""
    found = (tensor for state in modules for tensor in getattr(state.module, table).values())
    return list({id(tensor): tensor for tensor in found if tensor is not None}.values())


def _is_own(tensor: Tensor) -> bool:
    """Tell whether a tensor is no result of others, and can be written to."""
    return tensor.is_leaf and not tensor.is_inference()


def _is_small_value(tensor: Tensor) -> bool:
    """Tell whether a tensor inside an object is copied for the job: a cache may be large."""
    return not isinstance(tensor, nn.Parameter) and tensor.numel() * tensor.itemsize <= MOST_BYTES


def renormed(modules: Iterable[nn.Module]) -> set[int]:
    """Return the ids of tables whose rows a look-up shortens in place, by `max_norm`."""
    kinds = (nn.Embedding, nn.EmbeddingBag)
    tables = (module for module in modules if isinstance(module, kinds))
    return {id(table.weight) for table in tables if table.max_norm is not None}


class _ModuleState:
    """A submodule's attributes, and the entries of those that are dicts, lists or sets.

    Most of these are empty, for nobody registered a hook: they share one list. `plain_tensors`
    are tensors of its own that are registered nowhere.
    """

    __slots__ = (
        "_attributes",
        "_entries",
        "_kind",
        "_scripted",
        "_training",
        "module",
        "plain_tensors",
    )

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._kind = type(module)
        self._attributes = vars(module).copy()
        self._scripted = scripted_attributes(module)
        self._training = module.training
        self._entries: list[tuple[Any, list[Any]]] = []
        self.plain_tensors: list[Tensor] = []
        for value in (*self._attributes.values(), *self._scripted.values()):
            if isinstance(value, CONTAINERS):
                self._entries.append((value, entries_of(value) if value else NONE))
            elif isinstance(value, Tensor) and _is_own(value):
                self.plain_tensors.append(value)

    def restore(self) -> None:
        for container, entries in self._entries:
            if container or entries:
                refill(container, entries)
        if type(self.module) is not self._kind:  # by a parametrisation, say
            self.module.__class__ = self._kind
        vars(self.module).clear()
        vars(self.module).update(self._attributes)
        bind(self.module, self._scripted)
        if self.module.training != self._training:  # a scripted module has it elsewhere
            self.module.training = self._training


class _TensorState:
    """A parameter's or buffer's identity: which data it holds, its flags and its hooks."""

    __slots__ = ("_data", "_grad", "_hooks", "_later_hooks", "_requires_grad", "_tensor", "_value")

    def __init__(self, tensor: Tensor, *, with_value: bool = False) -> None:
        self._tensor = tensor
        self._data = tensor.detach()
        self._value = self._data.clone() if with_value else None
        self._requires_grad = tensor.requires_grad
        self._grad = tensor.grad
        self._hooks = entries_of(tensor._backward_hooks or {})
        self._later_hooks = entries_of(tensor._post_accumulate_grad_hooks or {})

    def restore(self) -> None:
        """Put it back; to be called under `torch.no_grad`."""
        tensor = self._tensor
        if tensor.grad_fn is not None:
            tensor.detach_()
        tensor.grad = None
        tensor.data = self._data
        if self._value is not None and not same_values(self._data, self._value):
            self._data.copy_(self._value)
        tensor.requires_grad_(self._requires_grad)
        tensor.grad = self._grad
        for hooks, entries in (
            (tensor._backward_hooks, self._hooks),
            (tensor._post_accumulate_grad_hooks, self._later_hooks),
        ):
            if hooks is not None:
                refill(hooks, entries)
