"""How much of what is read once, as soon as it is written, is made at a time."""

from __future__ import annotations

from collections.abc import Iterator

import torch

SLAB_BYTES = 64 * 2**20
CACHED_BYTES = 2 * 2**20


def cached_bytes(device: torch.device) -> int:
    """Return what stays in a processor's cache; a GPU runs few large kernels faster."""
    return CACHED_BYTES if device.type == "cpu" else SLAB_BYTES


def slabs(length: int, whole_bytes: int, slab_bytes: int) -> Iterator[tuple[int, int]]:
    """Cut a dim of something so large, into one slab at least, so that one stays near its size."""
    step = max(1, slab_bytes * length // max(1, whole_bytes))
    for start in range(0, max(1, length), step):
        yield start, min(start + step, length)
