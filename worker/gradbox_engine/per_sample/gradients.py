"""Gradients at edges of a graph or at its leaves, for one cotangent or for many at once.

float16 ends at 6e-8 below and 65504 above. Where a backward pass goes through it, the cotangent is
multiplied by one power of two, as those of a replay are (`replay.replay`), and the gradients,
in float32 or wider, are divided by it. Of several scales the first is taken at which the fewest
entries are not finite: what is infinite or NaN at all of them is so in any precision.

Shapes: Y cotangents.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import inf

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge

from gradbox_engine.model.precision import accumulation_dtype, fp16_scale
from gradbox_engine.replay.replay import LARGEST, MOST_STEPS, STEP
from gradbox_engine.torch_private import batched_gradients, nodes_behind

Wanted = Sequence[GradientEdge] | Sequence[Tensor]


def gradients(
    value: Tensor,
    wanted: Wanted,
    cotangent: Tensor,
    *,
    keep_graph: bool,
    in_float16: bool = False,
    batched: bool = False,
) -> Sequence[Tensor | None]:
    """Return the gradient at every edge or leaf, None where no path leads to one.

    Args:
        cotangent: of the shape of `value`, or Y of them, (Y, *value.shape).
        in_float16: whether the pass goes through float16; the graph is then kept.
        batched: whether there are Y cotangents, for a gradient (Y, ...) each.

    Raises:
        RuntimeError: an operation of the graph has no batching rule.
    """
    if not value.requires_grad or not wanted:
        return [None] * len(wanted)
    if in_float16:
        return _through_float16(partial(gradients, value, wanted, batched=batched), cotangent)
    if batched:
        return batched_gradients(value, wanted, cotangent, keep_graph=keep_graph)
    found: Sequence[Tensor | None] = torch.autograd.grad(
        value, wanted, cotangent, keep_graph, allow_unused=True
    )
    return found


def leaf_gradients(
    value: Tensor,
    wanted: Mapping[str, Tensor],
    cotangent: Tensor,
    *,
    leaves: Mapping[str, Tensor],
    keep_graph: bool,
    in_float16: bool = False,
) -> dict[str, Tensor | None]:
    """Return the whole gradient of every leaf in `wanted`, None where no path leads to one.

    A custom Function may call `backward` in its own, as reversible layers do. What that adds to
    `.grad` belongs to the gradient; what was there before does not, and is dropped.

    Args:
        leaves: all there are, `wanted` among them.
    """
    asked = asked_for(value, wanted, leaves)

    def whole(cotangent: Tensor, *, keep_graph: bool) -> Sequence[Tensor | None]:
        for leaf in leaves.values():
            leaf.grad = None
        returned = gradients(value, [*asked.values()], cotangent, keep_graph=keep_graph)
        found = [
            own if leaf.grad is None else leaf.grad if own is None else own + leaf.grad
            for own, leaf in zip(returned, asked.values(), strict=True)
        ]
        for leaf in asked.values():
            leaf.grad = None
        return found

    if in_float16 and value.requires_grad:
        found = _through_float16(whole, cotangent)
    else:
        found = whole(cotangent, keep_graph=keep_graph)
    by_name = dict(zip(asked, found, strict=True))
    return {name: by_name[name] for name in wanted}


def asked_for(
    value: Tensor, wanted: Mapping[str, Tensor], leaves: Mapping[str, Tensor]
) -> Mapping[str, Tensor]:
    """Return the leaves to ask autograd for, so that the gradients of `wanted` are whole.

    A custom Function runs where it is on the way to a leaf that is asked for, which a parameter
    that it adds to by itself need not be: where the graph holds one, all leaves are asked for.
    """
    if len(wanted) == len(leaves):
        return wanted
    custom = any(isinstance(node, BackwardCFunction) for node in nodes_behind(value))
    return leaves if custom else wanted


def gradients_in_turn(
    value: Tensor, wanted: Wanted, cotangents: Tensor, *, in_float16: bool = False
) -> Sequence[Tensor | None]:
    """Return the gradients for Y cotangents by one backward pass for each; keeps the graph."""
    rows = [gradients(value, wanted, c, keep_graph=True, in_float16=in_float16) for c in cotangents]
    return [
        None if parts[0] is None else torch.stack([g for g in parts if g is not None])
        for parts in zip(*rows, strict=True)
    ]


def _through_float16(
    take: Callable[..., Sequence[Tensor | None]], cotangent: Tensor
) -> Sequence[Tensor | None]:
    """Return what `take` gives for a cotangent, by passes at scales that float16 can hold."""
    scale = fp16_scale([cotangent.nan_to_num(0.0, 0.0, 0.0)], largest=LARGEST)
    best: Sequence[Tensor | None] = []
    fewest = inf
    for _ in range(MOST_STEPS + 1):
        found = [g if g is None else dense(g) for g in take(cotangent * scale, keep_graph=True)]
        lost = sum(g.numel() - int(g.isfinite().sum()) for g in found if g is not None)
        if lost < fewest:
            best = [g if g is None else g.to(accumulation_dtype(g.dtype)) / scale for g in found]
            fewest = lost
        if not lost:
            break
        scale *= STEP
    return best


def dense(gradient: Tensor) -> Tensor:
    """Return a gradient as it is, but that of a sparse embedding in all its entries."""
    return gradient.to_dense() if gradient.is_sparse else gradient
