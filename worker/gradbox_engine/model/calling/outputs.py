"""Where z is in what a model returns.

Models return tensors, tuples, dicts, dataclasses, and all of these nested. A choice is an index, a
key, an attribute, or several of them joined by dots: "last_hidden_state", 0, "vision.pooled.0".
Inside the engine z is always a dict from a readout's names to tensors; a bare tensor is named "".
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from types import ModuleType
from typing import Any, Final

from torch import Tensor

from gradbox_engine.errors import BadOutput
from gradbox_engine.model.precision import accumulation_dtype
from gradbox_engine.requests import Z

Outputs = dict[str, Tensor]
BARE = ""
MAX_LISTED = 12
NOT_NUMBERS: Final = "anything else has no gradient: choose another part by output= or readout="
FROM_COMPLEX: Final = (
    "give the loss real and imaginary parts by readout=lambda output, inputs: "
    "torch.view_as_real(output), of which torch.view_as_complex makes complex numbers again"
)


def choose(output: Any, choice: str | int | None) -> Any:
    """Follow `choice` into what a model returned; None leaves it as it is.

    Raises:
        BadOutput: a step of the choice is not there; the message lists what is.
    """
    if choice is None:
        return output
    value = output
    for step in [choice] if isinstance(choice, int) else choice.split("."):
        try:
            value = _step(value, step)
        except (KeyError, IndexError, AttributeError, TypeError):
            raise BadOutput(
                f"output: expected {choice!r} in what the model returned, got {describe(output)}"
            ) from None
    return value


def as_outputs(value: Any, *, source: str) -> Outputs:
    """Return z as a dict of floating-point tensors.

    Args:
        value: a tensor, or a dict of tensors.
        source: "model" or "readout", for the message.

    Raises:
        BadOutput: it is anything else; the message lists what there is and says what to choose.
    """
    if isinstance(value, Tensor):
        outputs = {BARE: value}
    elif source == "readout" and isinstance(value, dict) and value:
        outputs = value
    else:
        raise BadOutput(
            f"z: expected the {source} to return a tensor, got {describe(value)}; choose one by "
            f"output=, or compute one by readout="
        )
    for name, tensor in outputs.items():
        if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
            is_complex = isinstance(tensor, Tensor) and tensor.is_complex()
            raise BadOutput(
                f"z{name and f'[{name!r}]'}: expected a real floating-point tensor from the "
                f"{source}, got {describe(tensor)}; {FROM_COMPLEX if is_complex else NOT_NUMBERS}"
            )
    return outputs


def as_z(outputs: Outputs) -> Z:
    """Return what a loss or a scale sees: the tensor itself where there is just one, unnamed."""
    return outputs[BARE] if outputs.keys() == {BARE} else outputs


def wide_leaves(outputs: Outputs) -> Outputs:
    """Return z as a function of it gets it: leaves that require grad, in float32 or wider."""
    return {
        name: z.detach().to(accumulation_dtype(z.dtype)).requires_grad_()
        for name, z in outputs.items()
    }


def describe(value: Any) -> str:
    """Say what a model's output holds: types, keys, shapes."""
    if isinstance(value, Tensor):
        return _form(value)
    listed = [f"{key}: {_form(item)}" for key, item in _items(value)]
    if not listed:
        return f"{type(value).__name__}"
    more = f", and {len(listed) - MAX_LISTED} more" if len(listed) > MAX_LISTED else ""
    return f"{type(value).__name__} with {', '.join(listed[:MAX_LISTED])}{more}"


def _step(value: Any, step: str | int) -> Any:
    if isinstance(step, int):
        return value[step]
    if isinstance(value, Mapping) and step in value:
        return value[step]
    if step.lstrip("-").isdigit() and not isinstance(value, Tensor):
        return value[int(step)]
    if step not in dict(_items(value)):
        raise AttributeError  # methods, and what is reached through them, are not outputs
    return getattr(value, step)


def _items(value: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(value, Mapping):
        yield from value.items()
    elif isinstance(value, list | tuple):
        names = getattr(value, "_fields", range(len(value)))
        yield from zip(names, value, strict=True)
    elif is_dataclass(value) and not isinstance(value, type):
        yield from ((field.name, getattr(value, field.name, None)) for field in fields(value))
    elif hasattr(value, "__dict__") and not isinstance(value, Tensor | ModuleType | type):
        yield from ((name, item) for name, item in vars(value).items() if name[:1] != "_")


def _form(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} tensor {tuple(value.shape)}"
    return type(value).__name__
