"""Gradients by name, added into a module as `backward` would."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any, Final

from gradbox.errors import InvalidInputs

if TYPE_CHECKING:
    import torch

OF_THE_LOSS: Final = ("loss.", "loss_inputs.", "y.", "inner.", "outer.")


def add_gradients(
    module: torch.nn.Module,
    grads: Mapping[str, Any],
    *,
    unreached: Collection[str] = (),
    strict: bool = True,
    prefix: str = "",
) -> None:
    """Add gradients into `.grad` of a module's parameters.

    Args:
        unreached: the names of gradients that are zeros because no path leads to the parameter:
            `backward` leaves its `.grad` as it is.
        strict: refuse gradients of parameters that the module does not have.
        prefix: take only the gradients whose names begin so, without it.

    Raises:
        InvalidInputs: no module, an unknown name or another shape; nothing was changed.
    """
    if not hasattr(module, "named_parameters"):
        raise InvalidInputs(
            f"expected the nn.Module whose parameters get the gradients, got "
            f"{type(module).__name__}; an optimizer reads them from there in its step"
        )
    gradients: dict[str, Any] = {
        name.removeprefix(prefix): gradient
        for name, gradient in grads.items()
        if name.startswith(prefix)
    }
    # A tied parameter goes by all its names here; the result has one of them.
    parameters = dict(module.named_parameters(remove_duplicate=False))
    unknown = [
        name
        for name in gradients
        if name not in parameters and (prefix or not name.startswith(OF_THE_LOSS))
    ]
    if strict and unknown:
        raise InvalidInputs(
            f"expected gradients of the module's {len(parameters)} parameters, got some of "
            f"others: {_few(unknown)}; pass the same model as the job's, or strict=False"
        )
    wrong = [
        f"{name}: {tuple(gradient.shape)} for a parameter of {tuple(parameters[name].shape)}"
        for name, gradient in gradients.items()
        if name in parameters and gradient.shape != parameters[name].shape
    ]
    if wrong:
        raise InvalidInputs(f"expected gradients of the parameters' shapes: {_few(wrong)}")
    for name, gradient in gradients.items():
        reached = prefix + name not in unreached
        if reached and name in parameters and parameters[name].requires_grad:
            _accumulate(parameters[name], gradient)


def _accumulate(parameter: torch.nn.Parameter, gradient: torch.Tensor) -> None:
    if parameter.grad is None:
        # A copy in any case: the result's own tensor must not change with the parameter's.
        parameter.grad = gradient.to(parameter.device, parameter.dtype, copy=True)
    else:
        # In the wider of the two dtypes, then rounded once.
        parameter.grad.add_(gradient.to(parameter.device))


def _few(items: list[str]) -> str:
    return "; ".join(items[:5]) + (f"; and {len(items) - 5} more" if len(items) > 5 else "")
