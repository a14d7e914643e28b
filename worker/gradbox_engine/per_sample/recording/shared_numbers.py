"""Whether a forward pass makes numbers of several samples, which data may let decide for each.

A scale by `max()`, a length by `.item()`, a loop until all have converged: what a sample then gets
depends on the others without a derivative, or on some data alone, and a comparison on one shard
says little about the next. It shows in the calls of two probe runs on different numbers of samples:
a call is given a tensor that grows with the samples and returns one that does not, or returns a
number to Python. A custom Function may do so within.

`if x.all():` is none of these: the other branch calls other functions, which every shard shows
(`RecordedGraph.calls`). What a number is of is not asked: one read from a parameter counts as well.
Not seen: scripted functions, code that is not torch's, a custom Function's `apply` that was kept
under another name, a branch that differs in numbers alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from gradbox_engine.per_sample.recording.function_calls import Apply, tensors_of

READING: Final = frozenset(
    {"item", "tolist", "numpy", "is_nonzero", "equal", "allclose", "nonzero", "unique"}
    | {f"__{name}__" for name in ("int", "float", "complex", "index", "array", "contains")}
)
"""Functions that give Python a tensor's numbers, or a length that they decide."""

_LIKE: Final = frozenset({"to", "type", "type_as", "view_as", "reshape_as", "result_type"})
"""Functions that read no numbers of an argument, but its dtype, device or shape."""

SampleSizes = tuple[str, tuple[torch.Size, ...], tuple[torch.Size, ...]]
"""A function's name, and the shapes of the tensors that it was given and that it returned."""


def sizes_of(
    function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], out: Any
) -> SampleSizes:
    """Return what a call says of its samples."""
    name = "apply" if isinstance(function, Apply) else getattr(function, "__name__", "")
    given = tensors_of((*args, kwargs))
    return name, _shapes(given), _shapes(tensors_of(out))


def shares_numbers(first: Sequence[SampleSizes], second: Sequence[SampleSizes]) -> bool:
    """Return whether samples may decide something for each other.

    Args:
        first: the calls of a run, in order.
        second: those of a run on another number of samples.
    """
    names = [name for name, *_ in first]
    if names != [name for name, *_ in second]:
        return True
    following = [*names[1:], ""]
    return any(
        name in READING
        or name == "apply"
        or (given != others and _same(returned, other_returned) and not name.startswith("new_"))
        for (name, given, returned), (_, others, other_returned), next_name in zip(
            first, second, following, strict=True
        )
        if name not in _LIKE and not (name in ("all", "any") and next_name == "__bool__")
    )


def _same(returned: tuple[torch.Size, ...], others: tuple[torch.Size, ...]) -> bool:
    """Return whether a call returned a tensor that does not grow with the samples."""
    return any(a == b for a, b in zip(returned, others, strict=False))


def _shapes(tensors: Sequence[Tensor]) -> tuple[torch.Size, ...]:
    return tuple(tensor.shape for tensor in tensors)
