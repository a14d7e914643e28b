"""Dual tensors: a value with its tangent, alive inside `torch.autograd.forward_ad.dual_level`."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.autograd import forward_ad


def dual(primal: Tensor, tangent: Tensor) -> Tensor:
    """Return a view of `primal` that carries a tangent of the same shape and dtype."""
    joined: Tensor = forward_ad.make_dual(primal, tangent)  # type: ignore[no-untyped-call]
    return joined


def parts(value: Any) -> tuple[Any, Tensor | None]:
    """Return primal and tangent; None for a tangent where the value is constant."""
    if not isinstance(value, Tensor):
        return value, None
    unpacked = forward_ad.unpack_dual(value)  # type: ignore[no-untyped-call]
    return unpacked.primal, unpacked.tangent
