"""What a user is told of a call that raised: its arguments, where it happened, and what may help.

The message holds names, dtypes, shapes, one line of the model's code, and the range of integer
arguments where that is what is wrong. It holds no other values and no paths.
"""

from __future__ import annotations

import inspect
import linecache
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import PurePath
from types import FrameType, TracebackType
from typing import Any, Final

import torch
from torch import Tensor, nn

from gradbox_engine.model.calling.outputs import SWITCHED_ON

# Packages whose lines say nothing of the model.
_INFRASTRUCTURE: Final = frozenset({"torch", "gradbox", "gradbox_engine", "gradbox_worker"})
_SHOWN_ARGUMENTS: Final = 20
_LONGEST_LINE: Final = 160


def describe(
    error: Exception,
    trace: TracebackType | None,
    *,
    model: nn.Module | None,
    arguments: Mapping[str, Any],
) -> str:
    """Return lines that stand under an error's own message; empty if nothing is known."""
    frames = list(_frames(trace))
    name, module = _raising_submodule(frames, model)
    lines = []
    if arguments:
        lines.append(f"arguments: {', '.join(_listed(arguments))}")
    if module is not None:
        lines.append(f"submodule: {name or 'the model itself'} ({type(module).__name__})")
    if (line := _last_line(frames)) is not None:
        lines.append(f"line: {line}")
    lines += getattr(error, "__notes__", ())
    if (advice := hint(error, model=model, module=module, arguments=arguments)) is not None:
        lines.append(f"hint: {advice}")
    return "".join(f"\n  {line}" for line in lines)


def _frames(trace: TracebackType | None) -> Iterator[tuple[FrameType, int]]:
    while trace is not None:
        yield trace.tb_frame, trace.tb_lineno
        trace = trace.tb_next


def _raising_submodule(
    frames: list[tuple[FrameType, int]], model: nn.Module | None
) -> tuple[str, nn.Module | None]:
    """Return the innermost module of the model that was being called, with its name."""
    if model is None:
        return "", None
    names = {id(module): name for name, module in model.named_modules()}
    for frame, _ in reversed(frames):
        owner = frame.f_locals.get("self")
        if isinstance(owner, nn.Module) and id(owner) in names:
            return names[id(owner)], owner
    return "", None


def _last_line(frames: list[tuple[FrameType, int]]) -> str | None:
    """Return the innermost line that is neither torch's nor gradbox's."""
    for frame, number in reversed(frames):
        package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if package in _INFRASTRUCTURE or package == "contextlib":
            continue
        path = frame.f_code.co_filename
        source = linecache.getline(path, number).strip()[:_LONGEST_LINE]
        return f"{PurePath(path).name}:{number}{f': {source}' if source else ''}"
    return None


def _listed(arguments: Mapping[str, Any]) -> list[str]:
    named = [f"{_name(name)} {_form(value)}" for name, value in arguments.items()]
    left = len(named) - _SHOWN_ARGUMENTS
    return named[:_SHOWN_ARGUMENTS] + ([f"and {left} more"] if left > 0 else [])


def _name(name: str) -> str:
    return f"argument {name}" if name.isdigit() else name


def _form(value: Any) -> str:
    if isinstance(value, Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        return f"{dtype} {tuple(value.shape)}"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{name}: {_form(item)}" for name, item in value.items()) + "}"
    plain = isinstance(value, bool | int | float | str | None)
    return repr(value)[:50] if plain else type(value).__name__


@dataclass(frozen=True)
class FailedCall:
    """A call that raised, and its message's match with a pattern of `_HINTS`."""

    found: re.Match[str]
    model: nn.Module | None
    module: nn.Module | None
    arguments: Mapping[str, Any]

    @property
    def tensors(self) -> dict[str, Tensor]:
        return {n: value for n, value in self.arguments.items() if isinstance(value, Tensor)}

    @property
    def dtype(self) -> torch.dtype | None:
        """The dtype of the model's first floating-point parameter."""
        parameters = () if self.model is None else self.model.parameters()
        return next((p.dtype for p in parameters if p.is_floating_point()), None)


def hint(
    error: Exception,
    *,
    model: nn.Module | None,
    module: nn.Module | None,
    arguments: Mapping[str, Any],
) -> str | None:
    """Return a sentence on what may help, or None if the error is not a known one."""
    message = f"{type(error).__name__}: {error}"
    for pattern, advice in _HINTS:
        found = re.search(pattern, message)
        if found is None:
            continue
        if isinstance(advice, str):
            return advice.format(**found.groupdict())
        return advice(FailedCall(found, model, module, arguments))
    return None


def _dtype(call: FailedCall) -> str:
    other = {
        name: str(tensor.dtype)
        for name, tensor in call.tensors.items()
        if tensor.is_floating_point() and call.dtype not in (None, tensor.dtype)
    }
    wanted = str(call.dtype).removeprefix("torch.")
    if not other and any(tensor.dtype == call.dtype for tensor in call.tensors.values()):
        return (
            f"the model and its inputs are {wanted}, so its forward makes a tensor of another "
            f"dtype: there use dtype=x.dtype, and register constants with register_buffer; as it "
            f"is, the model runs in the dtype that it was written for, without precision='fp64'"
        )
    if not other and call.dtype is not None:
        return f"the model is {wanted}: convert inputs that are no ids with .to(torch.{wanted})"
    if not other:
        return "two tensors have different dtypes: convert one of them with .to(other.dtype)"
    named = ", ".join(
        f"{_name(name)} is {dtype.removeprefix('torch.')}" for name, dtype in other.items()
    )
    return (
        f"the model is {wanted} and {named}: convert the inputs with .to(torch.{wanted}), or "
        f"compute in float64 with precision='fp64'"
    )


def _sizes(call: FailedCall) -> str:
    """Say which sizes do not fit; where one is the length of token sequences, what is too long."""
    sizes = {int(call.found["left"]), int(call.found["right"])}
    if min(sizes) > 1 and _token_lengths(call) == {max(sizes)}:
        return _too_long(max(sizes), min(sizes))
    return (
        f"sizes {call.found['left']} and {call.found['right']} cannot be combined entry by entry: "
        f"they must be equal, or one of them 1"
    )


def _token_lengths(call: FailedCall) -> set[int]:
    """Return how long the sequences of ids, masks and the like among the arguments are."""
    return {x.shape[1] for x in call.tensors.values() if x.dtype is torch.int64 and x.ndim > 1}


def _too_long(tokens: int, positions: int) -> str:
    return (
        f"sequences of {tokens} tokens came, and the model has {positions} positions: cut them, "
        f"as by tokenizer(..., truncation=True, max_length={positions})"
    )


def _index(call: FailedCall) -> str:
    rows = getattr(call.module, "num_embeddings", None)
    ranges = {
        name: (int(tensor.min()), int(tensor.max()))
        for name, tensor in call.tensors.items()
        if tensor.numel()
        and not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype is torch.bool)
    }
    named = ", ".join(
        f"{_name(name)} holds {low} to {high}" for name, (low, high) in ranges.items()
    )
    if rows is not None:
        tokens = max(_token_lengths(call), default=0)
        if tokens > rows and all(low >= 0 and high < rows for low, high in ranges.values()):
            return _too_long(tokens, rows)
        return (
            f"the embedding has rows 0 to {rows - 1}, and {named or 'an index is none of them'}: "
            f"ids out of the vocabulary, of another tokenizer, or a sequence longer than there "
            f"are positions"
        )
    return f"an index is out of range{f': {named}' if named else ''}"


def _missing(call: FailedCall) -> str:
    return f"{_takes(call)}; the shards give {_names(call)}: name them {{argument: tensor}}"


def _takes(call: FailedCall) -> str:
    if call.module is None:
        return "an argument does not fit"
    try:
        parameters = [*inspect.signature(type(call.module).forward).parameters.values()]
    except (TypeError, ValueError):  # not a Python function
        return f"an argument of {type(call.module).__name__} does not fit"
    taken = ", ".join(str(parameter) for parameter in parameters[1:])
    return f"{type(call.module).__name__}.forward takes ({taken})"


def _names(call: FailedCall) -> str:
    return ", ".join(call.arguments) or "none"


def _product(call: FailedCall) -> str:
    wanted = getattr(call.module, "in_features", None)
    if wanted is not None:
        return (
            f"this layer takes {wanted} features in the last dimension, and gets "
            f"{call.found['width']}"
        )
    return (
        f"the last dimension of the left ({call.found['width']}) and the first of the right "
        f"({call.found['rows']}) must be equal in a matrix product"
    )


_HINTS: Final[tuple[tuple[str, str | Callable[[FailedCall], str]], ...]] = (
    (
        r"device-side assert",  # after which no argument can be read: the device refuses all work
        "most often an index is out of range: ids out of the vocabulary, or a sequence longer than "
        "there are positions; the same job on a CPU says which",
    ),
    (
        r"backward through the graph a second time",
        "most often the model keeps a tensor with its graph from one call to the next, as a cache "
        "in an attribute: detach it, or clear it at the beginning of its forward",
    ),
    (
        r"same device|not on the expected device|different from other tensors",
        "the model makes a tensor on a device of its own choice: in its forward use "
        "device=x.device, and register constants with register_buffer",
    ),
    (
        r"target dtype to be|expected scalar type Long|types: Long|Expected dtype int64|"
        r"used as indices must be",
        "ids, indices and class labels are int64: convert them with .to(torch.int64)",
    ),
    (r"expected scalar type|same dtype|should be the same|expected .* dtype|mixed dtype", _dtype),
    (r"index out of range|out of bounds|indices should be", _index),
    (r"TypeError: .*(missing|unexpected keyword|positional argument)", _missing),
    (r"cannot be multiplied \(\d+x(?P<width>\d+) and (?P<rows>\d+)x\d+\)", _product),
    (
        r"to have (?P<wanted>\d+) channels, but got (?P<got>\d+) channels",
        "a convolution takes (samples, {wanted} channels, …), and gets {got} channels: is dim 1 "
        "the channels, or is it another model's input?",
    ),
    (
        r"no field '(?P<field>hidden_states|attentions)'",
        SWITCHED_ON,
    ),
    (
        r"tuple indices must be integers or slices, not tuple",
        "an output of several tensors is indexed as if it were one: choose one by output=, or by "
        "its name or number first",
    ),
    (
        r"input batch_size \((?P<z>\d+)\) to match target batch_size \((?P<target>\d+)\)",
        "z has {z} rows and the target {target}; it needs one for each sample of all shards. For "
        "rows it is then cut with the shards; `inner` gets one shard's output and the whole of y",
    ),
    (
        r"size of (?:the )?tensor (?:a )?\((?P<left>\d+)\) must match .* \((?P<right>\d+)\) at",
        _sizes,
    ),
)
"""Patterns of messages, and what may help: a sentence with the pattern's groups, or a function."""
