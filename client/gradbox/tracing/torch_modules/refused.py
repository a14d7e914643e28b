"""Modules that no graph can hold, each with what to do instead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NoReturn

import torch.nn.functional as F
from torch import nn
from torch.distributions import Distribution
from torch.utils.hooks import BackwardHook

from gradbox.tracing.current import TRACED
from gradbox.tracing.refusals import HOOKED, ON_YOUR_SIDE, RUN_IT_HERE, instead_of
from gradbox.tracing.source_location import untraceable

_EVAL: Final = f"call .eval() on it; {instead_of('dropout')}"


def dropout(own: Callable[..., Any]) -> Callable[..., Any]:
    """Return what refuses a dropout in train mode, and records it otherwise."""

    def record(module: Any, input: Any) -> Any:
        if module.training and module.p:
            raise untraceable(f"nn.{type(module).__name__} drops entries in train mode", _EVAL)
        return own(module, input)

    return record


def rrelu(module: nn.RReLU, input: Any) -> Any:
    """Record the mean slope of eval mode."""
    if module.training:
        raise untraceable("nn.RReLU draws its slopes in train mode", _EVAL)
    return F.leaky_relu(input, (module.lower + module.upper) / 2, module.inplace)


def backward_hook(hook: BackwardHook, args: Any) -> NoReturn:
    """Refuse a module that changes gradients on their way back, which no graph shows."""
    raise untraceable(f"nn.{type(hook.module).__name__} has a backward hook", HOOKED)


def always(what: str, instead: str) -> Callable[..., NoReturn]:
    """Return what refuses a module, which `what` has as {}."""

    def refuse(module: nn.Module, *args: Any, **kwargs: Any) -> NoReturn:
        raise untraceable(what.format(f"nn.{type(module).__name__}"), instead)

    return refuse


not_recorded: Final = always("{} is not recorded", RUN_IT_HERE)
fractional_pooling: Final = always(
    "{} draws its windows", "use nn.MaxPool2d or nn.AdaptiveMaxPool2d"
)
several_devices: Final = always("{} cuts Z over devices", "hold its .module: Z is whole on the box")
cross_map_norm: Final = always(
    "{} is a custom autograd function, which would lose its backward", "use nn.LocalResponseNorm"
)
not_initialised: Final = always(
    "{} has no parameters yet", "call it once on a tensor as it will get, before it is traced"
)


def sample(distribution: Distribution, sample_shape: Any) -> NoReturn:
    """Refuse a draw from a distribution."""
    raise untraceable(f"{type(distribution).__name__} draws a sample", instead_of("rand"))


def matrix_distribution(distribution: Distribution, *args: Any, **kwargs: Any) -> NoReturn:
    """Refuse a distribution whose code chooses by the ranks of its arguments."""
    raise untraceable(
        f"{type(distribution).__name__} asks for ranks that are not known yet",
        f"write its density with torch.linalg.cholesky and solve_triangular, {ON_YOUR_SIDE}",
    )


def autocast(own: Callable[..., None]) -> Callable[..., None]:
    """Return what makes an autocast, for a device that may not be known yet.

    Switched off it changes nothing in a loss, which runs without; switched on it is refused by
    `Recording`. A readout runs in the model's own.
    """

    def initialise(context: Any, device_type: Any, *args: Any, **kwargs: Any) -> None:
        if TRACED.recording and TRACED.recording.structured:
            raise untraceable(
                "a readout switches autocast", "leave it out; precision= says how both are computed"
            )
        own(context, device_type if isinstance(device_type, str) else "cpu", *args, **kwargs)

    return initialise
