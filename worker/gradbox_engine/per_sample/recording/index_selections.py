"""Which dims of a tensor a call selects or moves entries of, where data may decide which.

Where that is the dim of the samples (sorting by length, routing to experts, a roll by a number that
data give), a comparison on one shard says nothing about the next: see `Plan.compares_always`. An
index made by `torch.arange` keeps every sample in its place, as in `h[torch.arange(B), last]`. A
custom Function that is given whole numbers may select by them.

Not seen: a permutation that is multiplied as a matrix, or applied by a function not named here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from gradbox_engine.per_sample.recording.function_calls import Apply

KEEPING_RANGES = frozenset({"to", "unsqueeze", "view", "reshape", "expand", "long", "int", "clone"})
"""Functions whose result on a range made by `torch.arange` is treated as that range."""

_BY_INDEX = frozenset({"__getitem__", "__setitem__"})
_BY_LIST = frozenset({"index_put", "index_put_"})
_BY_DIM = frozenset(
    {"index_select", "gather", "take_along_dim", "narrow"}
    | {f"{name}{end}" for name in ("index_add", "index_copy", "scatter") for end in ("", "_")}
    | {f"scatter_{name}{end}" for name in ("add", "reduce") for end in ("", "_")}
)
_OF_ALL = frozenset({"take", "masked_select", "masked_scatter", "masked_scatter_"})
_BY_SIZES = frozenset({"roll", "split", "split_with_sizes", "tensor_split", "chunk"})
_WHOLE = (None, None, None)  # of a slice

Selection = tuple[torch.Size, tuple[int, ...]]
"""A tensor's shape, and the dims of it in which entries are selected or moved."""


def selection(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    is_range: Callable[[Tensor], bool],
) -> Selection | None:
    """Return what a call selects from, None where it selects nothing.

    Args:
        is_range: whether `torch.arange` made a tensor.
    """
    name = getattr(function, "__name__", "")
    tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
    if isinstance(function, Apply):  # of which nothing is known
        index = next((x for x in tensors if not x.is_floating_point()), None)
        return None if index is None else (index.shape, tuple(range(index.dim())))
    if name == "embedding":  # of activations, for a table of parameters does not grow with samples
        return next((x for x in tensors if x.requires_grad), tensors[0]).shape, (0,)
    x = args[0] if args else kwargs.get("input")
    if not isinstance(x, Tensor):
        return None
    dims = _dims(name, x, args, kwargs, is_range)
    return None if dims is None else (x.shape, tuple(dim % max(1, x.dim()) for dim in dims))


def _dims(
    name: str,
    x: Tensor,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    is_range: Callable[[Tensor], bool],
) -> Sequence[int] | None:
    """Return the dims of `x` in which a function selects or moves entries, if it does."""
    if name in _OF_ALL:
        return range(x.dim())
    if name in _BY_DIM:
        dim = next((a for a in (*args[1:], kwargs.get("dim")) if isinstance(a, int)), None)
        return range(x.dim()) if dim is None else (dim,)
    if name in _BY_SIZES:
        dims = kwargs.get("dims", kwargs.get("dim", args[2] if len(args) > 2 else None))
        if dims is None:
            return range(x.dim()) if name == "roll" else (0,)
        return (dims,) if isinstance(dims, int) else dims
    if name in _BY_INDEX or name in _BY_LIST:
        parts = args[1] if len(args) > 1 else kwargs["indices"]
        listed = isinstance(parts, tuple) or name in _BY_LIST
        return _selected(tuple(parts) if listed else (parts,), x.dim(), is_range)
    return None


def _selected(
    parts: Sequence[Any], num_dims: int, is_range: Callable[[Tensor], bool]
) -> tuple[int, ...]:
    """Return the dims that tensors, lists or slices in an index select entries of."""
    after = next((i for i, part in enumerate(parts) if part is Ellipsis), len(parts))
    behind = sum(_indexed_dims(part) for part in parts[after + 1 :])
    dims: list[int] = []
    at = 0
    for number, part in enumerate(parts):
        if number == after:
            at = num_dims - behind
            continue
        width = _indexed_dims(part)
        if _selects(part, is_range):
            dims += range(at, at + width)
        at += width
    return tuple(dims)


def _selects(part: Any, is_range: Callable[[Tensor], bool]) -> bool:
    if isinstance(part, slice):
        return (part.start, part.stop, part.step) != _WHOLE
    return isinstance(part, list) or (isinstance(part, Tensor) and not is_range(part))


def _indexed_dims(part: Any) -> int:
    if part is None or part is Ellipsis or isinstance(part, bool):
        return 0
    if isinstance(part, Tensor) and part.dtype in (torch.bool, torch.uint8):
        return part.dim()
    return 1


def may_reorder(first: Sequence[Selection], second: Sequence[Selection]) -> bool:
    """Return whether entries were selected of a dim whose length grows with the number of samples.

    Args:
        first: what the calls of a run selected from, in order.
        second: the same of a run on another number of samples.
    """
    if [dims for _, dims in first] != [dims for _, dims in second]:
        return True
    return any(
        len(one) != len(two) or any(one[dim] != two[dim] for dim in dims)
        for (one, dims), (two, _) in zip(first, second, strict=True)
    )
