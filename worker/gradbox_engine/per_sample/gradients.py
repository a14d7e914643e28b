"""Gradients at edges of a graph or at its leaves, for one cotangent or for many at once.

Shapes: Y cotangents.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge

Wanted = Sequence[GradientEdge] | Sequence[Tensor]


def gradients(
    value: Tensor, wanted: Wanted, cotangent: Tensor, *, keep_graph: bool
) -> Sequence[Tensor | None]:
    """Return the gradient at every edge or leaf, None where no path leads to one.

    Args:
        cotangent: of the shape of `value`.
    """
    if not value.requires_grad or not wanted:
        return [None] * len(wanted)
    found: Sequence[Tensor | None] = torch.autograd.grad(
        value, wanted, cotangent, retain_graph=keep_graph, allow_unused=True
    )
    return found


def leaf_gradients(
    value: Tensor,
    wanted: Mapping[str, Tensor],
    cotangent: Tensor,
    *,
    leaves: Mapping[str, Tensor],
    keep_graph: bool,
) -> dict[str, Tensor | None]:
    """Return the whole gradient of every leaf in `wanted`, None where no path leads to one.

    A custom Function may call `backward` in its own, as reversible layers do. What that adds to
    `.grad` belongs to the gradient; what was there before does not, and is dropped.

    Args:
        leaves: all there are, `wanted` among them.
    """
    for leaf in leaves.values():
        leaf.grad = None
    asked = asked_for(value, wanted, leaves)
    returned = gradients(value, [*asked.values()], cotangent, keep_graph=keep_graph)
    found = dict(zip(asked, returned, strict=True))
    for name, leaf in asked.items():
        if leaf.grad is not None:
            gradient = found[name]
            found[name] = leaf.grad if gradient is None else gradient + leaf.grad
            leaf.grad = None
    return {name: found[name] for name in wanted}


def asked_for(
    value: Tensor, wanted: Mapping[str, Tensor], leaves: Mapping[str, Tensor]
) -> Mapping[str, Tensor]:
    """Return the leaves to ask autograd for, so that the gradients of `wanted` are whole.

    A custom Function runs where it is on the way to a leaf that is asked for, which a parameter
    that it adds to by itself need not be: where the graph holds one, all leaves are asked for.
    """
    return leaves if len(wanted) < len(leaves) and _holds_custom_function(value) else wanted


def _holds_custom_function(value: Tensor) -> bool:
    left, seen = [value.grad_fn], set()
    while left:
        node = left.pop()
        if node is None or node in seen:
            continue
        if isinstance(node, BackwardCFunction):
            return True
        seen.add(node)
        left += [following for following, _ in node.next_functions]
    return False


def batched_gradients(
    value: Tensor, wanted: Wanted, cotangents: Tensor, *, keep_graph: bool
) -> Sequence[Tensor | None]:
    """Return the same for every cotangent, (Y, ...) each.

    Args:
        cotangents: (Y, *value.shape).

    Raises:
        RuntimeError: an operation of the graph has no batching rule.
    """
    found: Sequence[Tensor | None] = torch.autograd.grad(
        value, wanted, cotangents, keep_graph, allow_unused=True, is_grads_batched=True
    )
    return found


def gradients_in_turn(value: Tensor, wanted: Wanted, cotangents: Tensor) -> Sequence[Tensor | None]:
    """Return the same by one backward pass for each cotangent; keeps the graph."""
    rows = [gradients(value, wanted, cotangent, keep_graph=True) for cotangent in cotangents]
    return [
        None if parts[0] is None else torch.stack([g for g in parts if g is not None])
        for parts in zip(*rows, strict=True)
    ]
