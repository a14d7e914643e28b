"""Weights that the user may change between calls: copies of them, and whether they changed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor, equal

from gradbox.errors import InvalidInputs


def snapshot(weights: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of the weights.

    Raises:
        InvalidInputs: one is no tensor.
    """
    return {name: _copy(value, name) for name, value in weights.items()}


def trainable_leaves(weights: Mapping[str, Any]) -> list[Tensor]:
    """Return the weights that autograd may be asked a gradient of.

    Left out are those with hooks, which would be called without a gradient.
    """
    return [
        value
        for value in weights.values()
        if isinstance(value, Tensor)
        and value.requires_grad
        and value.is_leaf
        and not (value._backward_hooks or value._post_accumulate_grad_hooks)
    ]


def same(before: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Tell whether the weights have the values they had; `.data` leaves no trace but the values."""
    return before.keys() == now.keys() and not changed(before, now)


def changed(before: Mapping[str, Any], now: Mapping[str, Any]) -> set[str]:
    """Return the names of tensors that are new, or have other values than before."""
    return {n for n, value in now.items() if n not in before or not _same(before[n], value)}


def _copy(value: Any, name: str) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, np.ndarray | np.generic):
        return value.copy()
    raise InvalidInputs(
        f"weights[{name!r}]: expected a torch tensor or a NumPy array, got {type(value).__name__}; "
        f"convert it with torch.as_tensor"
    )


def _same(before: Any, now: Any) -> bool:
    if isinstance(before, Tensor) != isinstance(now, Tensor) or before.dtype != now.dtype:
        return False
    if isinstance(now, Tensor):
        return before.device == now.device and equal(before, now.detach())
    return np.array_equal(before, now)
