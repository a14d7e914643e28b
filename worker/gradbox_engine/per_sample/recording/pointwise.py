"""Which functions act entry by entry after broadcasting, and which only expand.

A function is listed when replacing an argument by its broadcast copies cannot change the result.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

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
