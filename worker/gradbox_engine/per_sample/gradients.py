"""Gradients at edges of a graph or at its leaves, for one cotangent or for many at once.

`torch.autograd.grad` takes its arguments apart and together again in Python: a third of a backward
pass of a small model, and half of one with `is_grads_batched`. With its first cotangent a process
imports 486 modules, in 0.5 s. The functions underneath do neither, and their names are private to
torch; where a version of torch lacks one, `torch.autograd.grad` is called. All of this goes once
that call takes a tenth of a small backward pass at most.

Shapes: Y cotangents.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge

try:
    from torch._C import _vmapmode_decrement_nesting, _vmapmode_increment_nesting
    from torch.autograd.graph import _engine_run_backward

    _add_batch_dim, _remove_batch_dim = torch._add_batch_dim, torch._remove_batch_dim
    DIRECT = True
except (ImportError, AttributeError):
    DIRECT = False

Wanted = Sequence[GradientEdge] | Sequence[Tensor]


def gradients(
    value: Tensor, wanted: Wanted, cotangent: Tensor, *, keep_graph: bool
) -> Sequence[Tensor | None]:
    """Return the gradient at every edge or leaf, None where no path leads to one.

    Args:
        cotangent: of the shape of `value`.
    """
    if not value.requires_grad:
        return [None] * len(wanted)
    if not DIRECT:
        total = (value * cotangent).sum()
        found: Sequence[Tensor | None] = torch.autograd.grad(
            total, wanted, retain_graph=keep_graph, allow_unused=True
        )
        return found
    return _run(value, wanted, cotangent, keep_graph=keep_graph)


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
    if not DIRECT:
        found: Sequence[Tensor | None] = torch.autograd.grad(
            value,
            wanted,
            cotangents,
            retain_graph=keep_graph,
            allow_unused=True,
            is_grads_batched=True,
        )
        return found
    level = _vmapmode_increment_nesting()
    try:
        batched = _add_batch_dim(cotangents, 0, level)
        by_edge = _run(value, wanted, batched, keep_graph=keep_graph)
        sizes = (level, len(cotangents), 0)
        return [None if g is None else _remove_batch_dim(g, *sizes) for g in by_edge]
    finally:
        _vmapmode_decrement_nesting()


def gradients_in_turn(value: Tensor, wanted: Wanted, cotangents: Tensor) -> Sequence[Tensor | None]:
    """Return the same by one backward pass for each cotangent; keeps the graph."""
    rows = [gradients(value, wanted, cotangent, keep_graph=True) for cotangent in cotangents]
    return [
        None if parts[0] is None else torch.stack([g for g in parts if g is not None])
        for parts in zip(*rows, strict=True)
    ]


def _run(
    value: Tensor, wanted: Wanted, cotangent: Tensor, *, keep_graph: bool
) -> Sequence[Tensor | None]:
    found: Sequence[Tensor | None] = _engine_run_backward(
        (value,),
        (cotangent,),
        keep_graph,
        False,  # no graph of the gradients
        tuple(wanted),
        True,  # None where no path leads
        accumulate_grad=False,
    )
    return found
