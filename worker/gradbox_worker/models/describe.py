"""What a model looks like from outside: names, shapes and entry points, as a ModelView."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import nn

from gradbox.protocol import MethodView, ModelView, ParameterView
from gradbox_worker.models.models_file import ModelEntry

POSITIONAL: Final = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def describe_model(entry: ModelEntry, model: nn.Module, *, version: str) -> ModelView:
    """Describe a model for the service, which checks jobs against it before they run."""
    return ModelView(
        name=entry.name,
        version=version,
        num_parameters=sum(parameter.numel() for parameter in model.parameters()),
        parameters=[_tensor_view(name, p) for name, p in model.named_parameters()],
        buffers=[_tensor_view(name, buffer) for name, buffer in model.named_buffers()],
        methods={name: describe_method(getattr(model, name)) for name in entry.methods},
    )


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


def _tensor_view(name: str, tensor: torch.Tensor) -> ParameterView:
    return ParameterView(
        name=name, shape=list(tensor.shape), dtype=str(tensor.dtype).removeprefix("torch.")
    )
