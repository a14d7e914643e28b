"""What planning and running need to know of a model that is set up."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

CALL_ERRORS = (
    RuntimeError,
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    AssertionError,
    ArithmeticError,
)
"""What a model may raise when a guess at its batch dim was wrong."""


def fresh(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return copies for one call: a model may write to its arguments, and is called again."""
    return {
        name: value.clone() if isinstance(value, Tensor) else value
        for name, value in arguments.items()
    }


class WatchedModel(Protocol):
    """A model in its mode, its wanted parameters, and how to call it."""

    model: nn.Module
    parameters: dict[str, Tensor]
    unchecked: frozenset[str]
    rounding: torch.dtype  # the narrowest dtype in which the model multiplies

    def call(self, arguments: dict[str, Any]) -> Tensor:
        """Return z, whose dim 0 counts samples."""
        ...

    def restore_buffers(self) -> None:
        """Put the buffers back to what they were before the first call."""
        ...

    def stream(self, index: int) -> AbstractContextManager[None]:
        """Return the random numbers of one shard."""
        ...


Arguments = Mapping[str, Any]
