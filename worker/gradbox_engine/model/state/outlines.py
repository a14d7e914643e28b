"""What no state keeps, in outline: enough to tell whether it varies from shard to shard.

A tensor that a call caches may be large or hold a graph, so that n states cannot have it. It stays
as it is, so that a second pass in the order of the shards finds what the first one found where
every shard leaves the like of it. Where they vary, in a length, say, or in what is None, a replay
has to go through all shards in order.

What was there before the first shard is always put back, so a replay finds no tensor where the
first pass found none yet. But numbers and lengths that the first shard left for all are missing
where a later one begins as registered, on another device or in another job.
"""

from __future__ import annotations

from types import BuiltinFunctionType, FunctionType
from typing import Any

from torch import Tensor

from gradbox_engine.model.state.containers import CONTAINERS, VALUES, num_entries, parts_of
from gradbox_engine.model.tensor_equality import is_plain

Outline = list[Any]
"""Of all parts of a value their kinds; of containers also how many entries they have, of what can
be kept also which numbers, words, functions or classes these are."""


class KindName(str):
    """The name of a class, which alone tells nothing that a gradient may depend on."""

    __slots__ = ()


def outline(whole: Any, *, most_bytes: int) -> Outline:
    """Return the outline of something and all that is in it; keys do not count.

    Args:
        most_bytes: of a tensor whose numbers count.
    """
    told: Outline = []
    left, seen = [whole], set()
    while left:
        value = left.pop()
        if isinstance(value, VALUES):
            told.append(value)
        elif id(value) not in seen:
            seen.add(id(value))
            told.append(KindName(type(value).__name__))
            if isinstance(value, Tensor):
                told += _of_tensor(value, most_bytes)
            elif isinstance(value, (FunctionType, BuiltinFunctionType, type)):
                told.append(value)
            else:
                told += [num_entries(value)] if isinstance(value, CONTAINERS) else []
                left += (part for _, part in parts_of(value))
    return told


def beyond_kinds(whole: Outline) -> Outline:
    """Return an outline without what is None, and without bare kinds."""
    return [part for part in whole if not (part is None or isinstance(part, KindName))]


def _of_tensor(tensor: Tensor, most_bytes: int) -> Outline:
    if tensor.requires_grad and tensor.is_leaf:
        return [id(tensor)]
    if tensor.requires_grad or not is_plain(tensor) or tensor.nbytes > most_bytes:
        return []
    return [tuple(tensor.shape), tensor.flatten().tolist()]
