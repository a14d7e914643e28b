"""Registered tensors that lie in each other's memory: a buffer that is a row of another one, say.

Numbers that are written to one of them show in the others. They are given other memory together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from gradbox_engine.model.tensor_equality import is_plain


def blocks(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Return the tensors, each once, those together whose ranges of memory meet."""
    alone: list[list[Tensor]] = []
    by_storage: dict[tuple[torch.device, torch.dtype, int], list[Tensor]] = {}
    for tensor in {id(tensor): tensor for tensor in tensors}.values():
        if not (is_plain(tensor) and tensor.numel()):
            alone.append([tensor])
            continue
        storage = tensor.untyped_storage().data_ptr()
        by_storage.setdefault((tensor.device, tensor.dtype, storage), []).append(tensor)
    found: list[list[Tensor]] = []
    for sharing in by_storage.values():
        reached = -1
        for tensor in sorted(sharing, key=lambda tensor: tensor.storage_offset()):
            if tensor.storage_offset() < reached:
                found[-1].append(tensor)
            else:
                found.append([tensor])
            reached = max(reached, _end(tensor))
    return alone + found


def share_entries(a: Tensor, b: Tensor) -> bool:
    """Tell whether two tensors of a block have an entry in common; of two with gaps, if they begin
    at the same one."""
    if a.storage_offset() == b.storage_offset():
        return True
    whole = all(_end(x) - x.storage_offset() == x.numel() for x in (a, b))
    return whole and a.storage_offset() < _end(b) and b.storage_offset() < _end(a)


def move(block: Sequence[Tensor], to: Callable[[Tensor], Tensor]) -> None:
    """Let the tensors of a block point into new memory as they pointed into the old.

    Args:
        to: returns a copy of a tensor of shape (n,).
    """
    begin = min(tensor.storage_offset() for tensor in block)
    length = max(map(_end, block)) - begin
    new = to(torch.as_strided(block[0].detach(), (length,), (1,), begin))
    for tensor in block:
        offset = tensor.storage_offset() - begin
        tensor.data = torch.as_strided(new, tensor.shape, tensor.stride(), offset)


def _end(tensor: Tensor) -> int:
    """Return the place behind the last entry in the storage."""
    steps = ((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return int(tensor.storage_offset() + sum(steps) + 1)
