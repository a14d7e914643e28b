"""Reentrant checkpoints run plainly while we watch.

`torch.utils.checkpoint(..., use_reentrant=True)` runs its function without a graph and
back-propagates inside the backward pass, where no output edge can be had. Run plainly, the function
gives the same result and keeps its activations. Non-reentrant checkpoints need nothing.

Doubt: this exchanges a name in `torch.utils.checkpoint` for the time of one call, so no other
thread should build a checkpoint meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.utils.checkpoint as checkpoint


class _Plain:
    @staticmethod
    def apply(function: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
        return function(*args)


@contextmanager
def plain_checkpoints() -> Iterator[None]:
    """Run reentrant checkpoints as ordinary calls."""
    before = checkpoint.CheckpointFunction
    checkpoint.CheckpointFunction = _Plain  # type: ignore[assignment,misc]
    try:
        yield
    finally:
        checkpoint.CheckpointFunction = before  # type: ignore[misc]
