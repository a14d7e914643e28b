"""Which functions broadcast an argument, and which only expand.

Replacing such an argument by its broadcast copies cannot change the result: that of a function that
acts entry by entry, and the mask that attention adds to its scores.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_leaves

_NAMES = """
add sub mul div true_divide divide multiply subtract floor_divide pow maximum minimum lerp
addcmul addcdiv atan2 hypot where logaddexp fmax fmin clamp
""".split()

_OPERATORS = """
__add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ __truediv__ __rtruediv__ __pow__ __rpow__
add_ sub_ mul_ div_ __iadd__ __isub__ __imul__ __itruediv__
""".split()


def _named(names: list[str], *owners: Any) -> set[Callable[..., Any]]:
    return {getattr(owner, name) for owner in owners for name in names if hasattr(owner, name)}


POINTWISE = _named(_NAMES, torch, Tensor) | _named(_OPERATORS, Tensor) | _named(["rsub"], torch)
EXPANDING = _named(["expand", "expand_as", "repeat"], Tensor) | {
    torch.broadcast_to,
    Tensor.broadcast_to,
    torch.tile,
    Tensor.tile,
}


def broadcast_size(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], q: Tensor
) -> tuple[int, ...] | None:
    """Return the shape to which a function broadcasts its argument `q`, None if it may not."""
    if function is F.scaled_dot_product_attention:
        scores, mask = _scores(*args, **kwargs)
        return scores if q is mask else None
    if function not in POINTWISE:
        return None
    shapes = [x.shape for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    return tuple(torch.broadcast_shapes(*shapes))  # type: ignore[no-untyped-call]


def _scores(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, *_: Any, **__: Any
) -> tuple[tuple[int, ...], Tensor | None]:
    return (*query.shape[:-1], key.shape[-2]), attn_mask
