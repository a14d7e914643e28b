"""What no snapshot keeps, in outline: enough to tell whether it varies from shard to shard.

A tensor that a call caches may be large or hold a graph, so that n snapshots cannot have it. Where
every shard leaves the like of it, a replay finds what the first pass found: a length, what is None,
the numbers of an average. Where they vary, a replay has to go through all shards in order.

What was there before the first shard is always put back, so a replay finds no tensor where the
first pass found none yet. But numbers and lengths that the first shard left for all are missing
where a later one begins as registered, on another device or in another job.

Cost: once a shard, a copy of each small tensor that it bound anew; waits for the device.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from types import BuiltinFunctionType, FunctionType
from typing import Any, TypeVar

from torch import Tensor

from gradbox_engine.model.state.containers import CONTAINERS, VALUES, num_entries
from gradbox_engine.model.state.mutables import MOST_KEPT_BYTES, is_array, parts_of
from gradbox_engine.model.tensor_equality import equal_numbers, form, is_plain

Outline = list[Any]
"""The names of the kinds of all parts, None for what is None, a container's with its length;
functions, classes and leaves that require grad themselves; of a small tensor without a graph its
numbers."""

Key = TypeVar("Key", bound=Hashable)


def outline(whole: Any) -> Outline | None:
    """Return the outline of something and all that is in it; None if a number or word is.

    Keys do not count.
    """
    found: Outline = []
    left, seen = [whole], set()
    while left:
        value = left.pop()
        if value is None:
            found.append(None)
            continue
        if isinstance(value, VALUES) or is_array(value):
            return None
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, Tensor):
            found.append(_of_tensor(value))
        elif isinstance(value, (FunctionType, BuiltinFunctionType, type)):
            found.append(value)
        else:
            kind = type(value).__name__
            found.append((kind, num_entries(value)) if isinstance(value, CONTAINERS) else kind)
            left += (part for _, part in parts_of(value))
    return found


def varied(before: Mapping[Key, Outline] | None, now: Mapping[Key, Outline]) -> list[Key]:
    """Return of what the outlines differ between two shards; nothing if there was none before."""
    if before is None:
        return []
    return [key for key in {**before, **now} if not same_outline(before.get(key), now.get(key))]


def same_outline(a: Outline | None, b: Outline | None) -> bool:
    """Return whether two outlines are equal, NaN being a number."""
    if a is None or b is None:
        return a is b
    return len(a) == len(b) and all(map(_alike, a, b))


def beyond_kinds(whole: Outline) -> Outline:
    """Return an outline without its bare kinds."""
    return [part for part in whole if not (part is None or isinstance(part, str))]


def _of_tensor(tensor: Tensor) -> Any:
    if tensor.requires_grad and tensor.is_leaf:
        return tensor
    if tensor.requires_grad or not is_plain(tensor) or tensor.nbytes > MOST_KEPT_BYTES:
        return type(tensor).__name__
    return tensor.detach().clone()


def _alike(a: Any, b: Any) -> bool:
    if a is b:
        return True
    if isinstance(a, (str, tuple)) and isinstance(b, (str, tuple)):
        return a == b
    if not (isinstance(a, Tensor) and isinstance(b, Tensor)) or a.requires_grad or b.requires_grad:
        return False
    return form(a) == form(b) and equal_numbers(a, b)
