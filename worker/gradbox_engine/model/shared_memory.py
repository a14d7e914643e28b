"""Tensors that lie in each other's memory: a buffer that is a row of another one, say.

Numbers that are written to one of them show in the others. They are given other memory together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from gradbox_engine.model.tensor_equality import is_plain


def blocks(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Return the tensors, each once, those together whose ranges of memory meet."""
    alone: list[list[Tensor]] = []
    by_storage: dict[tuple[torch.device, int], list[Tensor]] = {}
    for tensor in {id(tensor): tensor for tensor in tensors}.values():
        if is_plain(tensor) and tensor.numel() and not tensor.is_meta:
            storage = tensor.untyped_storage().data_ptr()
            by_storage.setdefault((tensor.device, storage), []).append(tensor)
        else:
            alone.append([tensor])
    found: list[list[Tensor]] = []
    for sharing in by_storage.values():
        reached = -1
        for tensor in sorted(sharing, key=Tensor.data_ptr):
            if tensor.data_ptr() < reached:
                found[-1].append(tensor)
            else:
                found.append([tensor])
            reached = max(reached, tensor.data_ptr() + _length(tensor) * tensor.itemsize)
    return alone + found


def copies(
    tensors: Iterable[Tensor], *, dtype: Callable[[torch.dtype], torch.dtype] = lambda own: own
) -> dict[int, Tensor]:
    """Return copies without a graph, by id; those of one dtype share memory as the tensors do.

    Args:
        dtype: which one a copy has, by that of the tensor.
    """
    found: dict[int, Tensor] = {}
    for block in blocks(tensors):
        for own in {tensor.dtype for tensor in block}:
            alike = [tensor.detach() for tensor in block if tensor.dtype == own]
            copied = _copied(alike, dtype(own))
            found |= zip((id(t) for t in block if t.dtype == own), copied, strict=True)
    return found


def _copied(alike: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    if len(alike) == 1:
        return [alike[0].to(dtype, copy=True)]
    begin = min(tensor.storage_offset() for tensor in alike)
    end = max(tensor.storage_offset() + _length(tensor) for tensor in alike)
    whole = torch.as_strided(alike[0], (end - begin,), (1,), begin).to(dtype, copy=True)
    return [
        torch.as_strided(whole, tensor.shape, tensor.stride(), tensor.storage_offset() - begin)
        for tensor in alike
    ]


def _length(tensor: Tensor) -> int:
    """Return how many places there are from the first entry to the last one."""
    steps = ((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return int(sum(steps)) + 1
