"""Which operations write, and tensors of a function that share the memory written to.

The box has a copy of every tensor that a graph reads, so a write there reaches one alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch.fx import Graph as FxGraph
from torch.fx import Node

from gradbox.errors import UntraceableLoss
from gradbox.graphs import allow_list, targets
from gradbox.graphs.check import function_writes

_NORMS: Final = (F.batch_norm, F.instance_norm)


def writes(kind: str, target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Tell whether an operation may write into an argument."""
    if kind == "call_method":
        return target in allow_list.IN_PLACE
    return function_writes(targets.name_of(target), args, kwargs)


def check_shared_memory(graph: FxGraph, tensors: Mapping[str, torch.Tensor]) -> None:
    """Refuse a write that another tensor of the function would show on the laptop alone.

    Args:
        graph: what was recorded.
        tensors: what it reads, by name.

    Raises:
        UntraceableLoss: a tensor that is written to shares memory with another.
    """
    changed = {_base(value) for node in graph.nodes for value in _written(node)}
    for one, other in combinations(tensors, 2):
        if changed & {one, other} and _share_storage(tensors[one], tensors[other]):
            shapes = " and ".join(str(tuple(tensors[name].shape)) for name in (one, other))
            raise UntraceableLoss(
                f"the function writes to one of two tensors, of shapes {shapes}, that share "
                "memory, and on the box each is a copy; take the view inside the function"
            )


def _written(node: Node) -> list[Node]:
    """Return what a node may write into."""
    if not writes(node.op, node.target, node.args, dict(node.kwargs)):
        return []
    num = 3 if node.target in _NORMS else 1  # the input, the running mean and variance
    return [value for value in (*node.args, *node.kwargs.values())[:num] if isinstance(value, Node)]


def _base(node: Node) -> Any:
    """Return the name of the tensor of which a node may be a view, None if there is none."""
    while node.op != "get_attr":
        first = next(iter((*node.args, *node.kwargs.values())), None)
        first = first[0] if isinstance(first, list | tuple) and first else first
        if not isinstance(first, Node):
            return None
        node = first
    return node.target


def _share_storage(one: torch.Tensor, other: torch.Tensor) -> bool:
    pointers = {tensor.untyped_storage().data_ptr() for tensor in (one, other)}
    return one.device == other.device and len(pointers) == 1 and 0 not in pointers
