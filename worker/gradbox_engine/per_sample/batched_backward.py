"""One backward pass for many cotangents at once, as `is_grads_batched` of torch.

`torch.autograd.grad(..., is_grads_batched=True)` walks over nested arguments in Python, which is
half of the pass on a small model, and imports 486 modules in its first call of a process, 0.5 s.
The functions underneath do neither, and their names are private to torch; where a version of torch
lacks one, its own way is taken.

Shapes: Y cotangents.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

try:
    from torch._C import _vmapmode_decrement_nesting, _vmapmode_increment_nesting
    from torch.autograd.graph import _engine_run_backward

    _add_batch_dim, _remove_batch_dim = torch._add_batch_dim, torch._remove_batch_dim
    DIRECT = True
except (ImportError, AttributeError):
    DIRECT = False


def batched_gradients(
    value: Tensor, edges: Sequence[GradientEdge] | Sequence[Tensor], cotangents: Tensor, *, keep_graph: bool
) -> Sequence[Tensor | None]:
    """Return the gradients at edges or leaves for every cotangent, (Y, ...) each; None where no path leads.

    Args:
        cotangents: (Y, *value.shape).

    Raises:
        RuntimeError: an operation of the graph has no batching rule.
    """
    if not DIRECT:
        found: Sequence[Tensor | None] = torch.autograd.grad(
            value,
            edges,
            cotangents,
            retain_graph=keep_graph,
            allow_unused=True,
            is_grads_batched=True,
        )
        return found
    level = _vmapmode_increment_nesting()
    try:
        gradients = _engine_run_backward(
            (value,),
            (_add_batch_dim(cotangents, 0, level),),
            keep_graph,
            False,  # no graph of the gradients
            tuple(edges),
            True,  # None where no path leads
            accumulate_grad=False,
        )
        sizes = (level, len(cotangents), 0)
        return [None if g is None else _remove_batch_dim(g, *sizes) for g in gradients]
    finally:
        _vmapmode_decrement_nesting()
