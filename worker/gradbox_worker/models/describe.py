"""What a model looks like from outside: names, shapes and entry points, as a ModelView."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any, Final

import torch
from torch import nn

from gradbox.protocol import MethodView, ModelView, ParameterView
from gradbox_engine.model.tensor_equality import strided_parts
from gradbox_engine.torch_private import is_traceable_wrapper_subclass
from gradbox_worker.models.example import find_example
from gradbox_worker.models.models_file import ModelEntry

REASON_LENGTH: Final = 2000  # it stands in what the worker announces every few seconds
POSITIONAL: Final = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def describe_model(entry: ModelEntry, model: nn.Module, *, version: str) -> ModelView:
    """Describe a model for the service, which checks jobs against it before they run.

    The model is called once or a few times, on the device that it is on, for an example; it is as
    before afterwards.
    """
    view = describe_module(entry.name, model, methods=entry.methods, version=version)
    return view.model_copy(update={"example": find_example(model, entry.methods[0])})


def describe_module(
    name: str, model: nn.Module, *, methods: Iterable[str], version: str
) -> ModelView:
    """Describe a model, which is not called.

    Args:
        methods: the entry points that jobs may call.
    """
    return ModelView(
        name=name,
        version=version,
        num_parameters=sum(parameter.numel() for parameter in model.parameters()),
        size_bytes=size_bytes(model),
        parameters=[_tensor_view(name, p) for name, p in model.named_parameters()],
        buffers=[_tensor_view(name, buffer) for name, buffer in model.named_buffers()],
        tied=_tied_names(model),
        methods={method: describe_method(getattr(model, method)) for method in methods},
    )


def unusable(name: str, reason: str) -> ModelView:
    """Describe a model that cannot be built."""
    return ModelView(name=name, usable=False, reason=reason[:REASON_LENGTH])


def size_bytes(model: nn.Module) -> int:
    """Return the bytes of a model's parameters and buffers, tied ones once."""
    tensors = {id(t): t for t in (*model.parameters(), *model.buffers())}.values()
    return sum(part.nbytes for tensor in tensors for part in strided_parts(tensor))


def describe_method(method: Callable[..., Any]) -> MethodView:
    """List a method's arguments in order.

    One whose signature cannot be read counts as taking anything.
    """
    try:
        parameters = inspect.signature(method).parameters.values()
    except ValueError:
        return MethodView(arguments=[], required=[], any_keyword=True, any_positional=True)
    named = [p for p in parameters if p.kind in (*POSITIONAL, inspect.Parameter.KEYWORD_ONLY)]
    kinds = {p.kind for p in parameters}
    return MethodView(
        arguments=[p.name for p in named],
        required=[p.name for p in named if p.default is inspect.Parameter.empty],
        any_keyword=inspect.Parameter.VAR_KEYWORD in kinds,
        any_positional=inspect.Parameter.VAR_POSITIONAL in kinds,
    )


def _tied_names(model: nn.Module) -> dict[str, str]:
    """Return every further name of a parameter or buffer, with its first one."""
    firsts: dict[int, str] = {}
    named = [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]
    pairs = [(name, firsts.setdefault(id(tensor), name)) for name, tensor in named]
    return {name: first for name, first in pairs if name != first}


def _tensor_view(name: str, tensor: torch.Tensor) -> ParameterView:
    # Of a quantised tensor, which says that it is float32, the dtype that it is kept in.
    kept = strided_parts(tensor)[0] if is_traceable_wrapper_subclass(tensor) else tensor
    return ParameterView(
        name=name, shape=list(tensor.shape), dtype=str(kept.dtype).removeprefix("torch.")
    )
