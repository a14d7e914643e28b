"""Which dims of a tensor a call picks entries of by an index that data may decide.

Where that is the dim of the samples (sorting by length, routing to experts), the rows of one shard
say nothing about those of the next: see `Plan.reorders`. An index that `torch.arange` made keeps
every sample in its place, as in `h[torch.arange(B), last]`.

Not seen: a permutation that is multiplied as a matrix, or applied by a function not named here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

KEEPING = frozenset({"to", "unsqueeze", "view", "reshape", "expand", "long", "int", "clone"})
"""Functions of an index behind which it still counts."""

_BY_INDEX = frozenset({"__getitem__", "__setitem__"})
_BY_LIST = frozenset({"index_put", "index_put_"})
_BY_DIM = frozenset(
    {"index_select", "gather", "take_along_dim"}
    | {f"{name}{end}" for name in ("index_add", "index_copy", "scatter") for end in ("", "_")}
    | {f"scatter_{name}{end}" for name in ("add", "reduce") for end in ("", "_")}
)
_OF_ALL = frozenset({"take", "masked_select", "masked_scatter", "masked_scatter_"})

Selection = tuple[torch.Size, tuple[int, ...]]
"""A tensor's shape, and the dims of it in which entries are picked."""


def selection(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    counts: Callable[[Tensor], bool],
) -> Selection | None:
    """Return what a call picks from, None where it picks nothing.

    Args:
        counts: whether `torch.arange` made a tensor.
    """
    name = getattr(function, "__name__", "")
    x = args[0] if args else kwargs.get("input")
    if not isinstance(x, Tensor):
        return None
    if name in _OF_ALL:
        return x.shape, tuple(range(x.dim()))
    if name in _BY_DIM:
        dim = next((a for a in (*args[1:], kwargs.get("dim")) if isinstance(a, int)), None)
        return x.shape, (tuple(range(x.dim())) if dim is None else (dim % max(1, x.dim()),))
    if name in _BY_INDEX or name in _BY_LIST:
        parts = args[1] if len(args) > 1 else kwargs["indices"]
        listed = isinstance(parts, tuple) or name in _BY_LIST
        return x.shape, _picked(tuple(parts) if listed else (parts,), x.dim(), counts)
    return None


def _picked(
    parts: Sequence[Any], num_dims: int, counts: Callable[[Tensor], bool]
) -> tuple[int, ...]:
    """Return the dims that tensors or lists in an index pick entries of."""
    after = next((i for i, part in enumerate(parts) if part is Ellipsis), len(parts))
    behind = sum(_consumed(part) for part in parts[after + 1 :])
    dims: list[int] = []
    at = 0
    for number, part in enumerate(parts):
        if number == after:
            at = num_dims - behind
            continue
        many = _consumed(part)
        picks = isinstance(part, list) or (isinstance(part, Tensor) and not counts(part))
        if picks:
            dims += range(at, at + many)
        at += many
    return tuple(dims)


def _consumed(part: Any) -> int:
    if part is None or part is Ellipsis or isinstance(part, bool):
        return 0
    if isinstance(part, Tensor) and part.dtype in (torch.bool, torch.uint8):
        return part.dim()
    return 1


def may_reorder(first: Sequence[Selection], second: Sequence[Selection]) -> bool:
    """Say whether entries were picked of a dim whose length depends on how many samples there are.

    Args:
        first: what the calls of a run picked from, in order.
        second: the same of a run on another number of samples.
    """
    if [dims for _, dims in first] != [dims for _, dims in second]:
        return True
    return any(
        len(one) != len(two) or any(one[dim] != two[dim] for dim in dims)
        for (one, dims), (two, _) in zip(first, second, strict=True)
    )
