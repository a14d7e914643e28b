"""Dropout that drops nothing: the argument itself, as in torch."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch.nn.functional as F

_DROPOUTS: Final[tuple[Callable[..., Any], ...]] = (
    F.dropout,
    F.dropout1d,
    F.dropout2d,
    F.dropout3d,
    F.alpha_dropout,
    F.feature_alpha_dropout,
)


def drops_nothing(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> bool:
    """Tell whether a call is one of dropout in eval mode, or with probability 0."""
    if func not in _DROPOUTS:
        return False
    bound = inspect.signature(func).bind(*args, **kwargs)
    bound.apply_defaults()
    return not bound.arguments["training"] or bound.arguments["p"] == 0
