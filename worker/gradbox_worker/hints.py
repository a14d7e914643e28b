"""What may help where a call of the engine failed, in the words of the public API.

The range of integer arguments is told where that is what is wrong, and no other values.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from gradbox_engine.errors import EngineError, FailedCall, ModelCallFailed
from gradbox_engine.model.calling.blame import argument_name

MARK: Final = "\n  hint: "


def with_hint(error: EngineError) -> str:
    """Return an error's message, and a line on what may help where it is a known one."""
    message = str(error)
    if MARK in message:  # of a device of a cluster, which knew the arguments
        return message
    call = error.call if isinstance(error, ModelCallFailed) else None
    raised = error if call is None else error.__cause__
    found = _hint(f"{type(raised).__name__}: {raised}", call or FailedCall(None, None, {}))
    return message if found is None else f"{message}{MARK}{found}"


def _hint(message: str, call: FailedCall) -> str | None:
    for pattern, advice in _HINTS:
        found = re.search(pattern, message)
        if found is not None:
            if isinstance(advice, str):
                return advice.format(**found.groupdict())
            return advice(_Match(found, call))
    return None


@dataclass(frozen=True)
class _Match:
    """A call that raised, and its message's match with a pattern of `_HINTS`."""

    found: re.Match[str]
    call: FailedCall

    @property
    def tensors(self) -> dict[str, Tensor]:
        named = self.call.arguments.items()
        return {name: value for name, value in named if isinstance(value, Tensor)}

    @property
    def dtype(self) -> torch.dtype | None:
        """The dtype of the model's first floating-point parameter."""
        parameters = () if self.call.model is None else self.call.model.parameters()
        return next((p.dtype for p in parameters if p.is_floating_point()), None)


def _dtype(match: _Match) -> str:
    other = {
        name: str(tensor.dtype)
        for name, tensor in match.tensors.items()
        if tensor.is_floating_point() and match.dtype not in (None, tensor.dtype)
    }
    wanted = str(match.dtype).removeprefix("torch.")
    if not other and any(tensor.dtype == match.dtype for tensor in match.tensors.values()):
        return (
            f"the model and its inputs are {wanted}, so its forward makes a tensor of another "
            f"dtype: there use dtype=x.dtype, and register constants with register_buffer; as it "
            f"is, the model runs in the dtype that it was written for, without precision='fp64'"
        )
    if not other and match.dtype is not None:
        return f"the model is {wanted}: convert inputs that are no ids with .to(torch.{wanted})"
    if not other:
        return "two tensors have different dtypes: convert one of them with .to(other.dtype)"
    named = ", ".join(
        f"{argument_name(name)} is {dtype.removeprefix('torch.')}" for name, dtype in other.items()
    )
    return (
        f"the model is {wanted} and {named}: convert the inputs with .to(torch.{wanted}), or "
        f"compute in float64 with precision='fp64'"
    )


def _sizes(match: _Match) -> str:
    """Name sizes that do not fit; where one is the length of token sequences, what is too long."""
    left, right = match.found["left"], match.found["right"]
    sizes = {int(left), int(right)}
    if min(sizes) > 1 and _token_lengths(match) == {max(sizes)}:
        return _too_long(max(sizes), min(sizes))
    return (
        f"sizes {left} and {right} cannot be combined entry by entry: they must be equal, or one "
        f"of them 1"
    )


def _token_lengths(match: _Match) -> set[int]:
    """Return how long the sequences of ids, masks and the like among the arguments are."""
    return {x.shape[1] for x in match.tensors.values() if x.dtype is torch.int64 and x.ndim > 1}


def _too_long(tokens: int, positions: int) -> str:
    return (
        f"sequences of {tokens} tokens came, and the model has {positions} positions: cut them, "
        f"as by tokenizer(..., truncation=True, max_length={positions})"
    )


def _index(match: _Match) -> str:
    rows = getattr(match.call.module, "num_embeddings", None)
    ranges = {
        name: (int(tensor.min()), int(tensor.max()))
        for name, tensor in match.tensors.items()
        if tensor.numel()
        and not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype is torch.bool)
    }
    named = ", ".join(
        f"{argument_name(name)} holds {low} to {high}" for name, (low, high) in ranges.items()
    )
    if rows is not None:
        tokens = max(_token_lengths(match), default=0)
        if tokens > rows and all(low >= 0 and high < rows for low, high in ranges.values()):
            return _too_long(tokens, rows)
        return (
            f"the embedding has rows 0 to {rows - 1}, and {named or 'an index is none of them'}: "
            f"ids out of the vocabulary, of another tokenizer, or a sequence longer than there "
            f"are positions"
        )
    return f"an index is out of range{f': {named}' if named else ''}"


def _missing(match: _Match) -> str:
    return f"{_takes(match)}; the shards give {_names(match)}: name them {{argument: tensor}}"


def _takes(match: _Match) -> str:
    if match.call.module is None:
        return "an argument does not fit"
    try:
        parameters = [*inspect.signature(type(match.call.module).forward).parameters.values()]
    except (TypeError, ValueError):  # not a Python function
        return f"an argument of {type(match.call.module).__name__} does not fit"
    taken = ", ".join(str(parameter) for parameter in parameters[1:])
    return f"{type(match.call.module).__name__}.forward takes ({taken})"


def _names(match: _Match) -> str:
    return ", ".join(match.call.arguments) or "none"


def _product(match: _Match) -> str:
    wanted = getattr(match.call.module, "in_features", None)
    if wanted is not None:
        return (
            f"this layer takes {wanted} features in the last dimension, and gets "
            f"{match.found['width']}"
        )
    return (
        f"the last dimension of the left ({match.found['width']}) and the first of the right "
        f"({match.found['rows']}) must be equal in a matrix product"
    )


_HINTS: Final[tuple[tuple[str, str | Callable[[_Match], str]], ...]] = (
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
        r"the derivative for '(?P<operation>\w+)' is not implemented",
        "second derivatives are taken here, and this operation has none: write it out of simpler "
        "ones; torch.cdist has them with compute_mode='use_mm_for_euclid_dist'",
    ),
    (
        r"to have (?P<wanted>\d+) channels, but got (?P<got>\d+) channels",
        "a convolution takes (samples, {wanted} channels, …), and gets {got} channels: is dim 1 "
        "the channels, or is it another model's input?",
    ),
    (
        r"(no field|output: expected) '(?P<field>hidden_states|attentions)'",
        "a transformers model returns {field} where its block of models.toml has "
        "kwargs = {{output_{field} = true}}",
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
