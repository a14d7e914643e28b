"""What a module asks of its arguments, recorded for the box to check."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn


def of_rank(*ranks: int) -> Callable[..., None]:
    """Return what records that the argument of a module has one of these numbers of dimensions."""

    def check(module: nn.Module, input: Any) -> None:
        holds = input.dim() == ranks[0]
        for rank in ranks[1:]:
            holds = holds | (input.dim() == rank)
        expected = " or ".join(f"{rank}D" for rank in ranks)
        record_assertion(holds, f"{type(module).__name__}: expected {expected} input")

    return check


def record_assertion(holds: Any, message: str) -> None:
    """Record an assertion."""
    torch._assert(holds, message)  # type: ignore[no-untyped-call]
