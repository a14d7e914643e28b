"""Whether two tensors hold the same numbers, whatever their layout."""

from __future__ import annotations

import torch
from torch import Tensor

PLAIN_INDICES = {
    torch.sparse_csr: ("crow_indices", "col_indices"),
    torch.sparse_bsr: ("crow_indices", "col_indices"),
    torch.sparse_csc: ("ccol_indices", "row_indices"),
    torch.sparse_bsc: ("ccol_indices", "row_indices"),
}


def form(tensor: Tensor) -> tuple[torch.Size, torch.dtype, torch.device, torch.layout]:
    """Return everything about a tensor but its numbers."""
    return tensor.shape, tensor.dtype, tensor.device, tensor.layout


def same_values(a: Tensor, b: Tensor) -> bool:
    """Return whether form and numbers are equal; NaN is not. Waits for the device.

    Sparse tensors are equal if they hold the same entries in the same order.
    """
    if form(a) != form(b):
        return False
    return all(
        x.shape == y.shape and torch.equal(x, y)
        for x, y in zip(strided_parts(a), strided_parts(b), strict=True)
    )


def strided_parts(tensor: Tensor) -> list[Tensor]:
    """Return the strided tensors that a tensor consists of."""
    if tensor.layout is torch.strided:
        return [tensor]
    tensor = tensor.detach()
    if tensor.layout is torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    if tensor.layout in PLAIN_INDICES:
        indices = (getattr(tensor, name)() for name in PLAIN_INDICES[tensor.layout])
        return [*indices, tensor.values()]
    return [tensor.to_dense()]


def writable(tensor: Tensor) -> bool:
    """Return whether numbers can be copied into it: it is dense, each entry in its own place."""
    return tensor.layout is torch.strided and not any(
        stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)
    )
