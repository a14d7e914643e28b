"""What tensors consist of, whatever their layout, and whether two hold the same numbers."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from gradbox_engine.torch_private import is_traceable_wrapper_subclass, sparse_parts

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


def equal_numbers(a: Tensor, b: Tensor) -> bool:
    """Return whether two dense tensors of one form hold the same numbers, NaN being one of them."""
    if torch.equal(a, b):
        return True
    return bool(((a == b) | ((a != a) & (b != b))).all())


def strided_parts(tensor: Tensor) -> list[Tensor]:
    """Return the strided tensors that a tensor consists of, a quantised one of torchao's, say."""
    if is_traceable_wrapper_subclass(tensor):
        names, _ = tensor.__tensor_flatten__()
        return [part for name in names for part in strided_parts(getattr(tensor, name))]
    if tensor.layout is torch.strided:
        return [tensor]
    tensor = tensor.detach()
    if tensor.layout is torch.sparse_coo:
        return sparse_parts(tensor)
    if tensor.layout in PLAIN_INDICES:
        indices = (getattr(tensor, name)() for name in PLAIN_INDICES[tensor.layout])
        return [*indices, tensor.values()]
    return [tensor.to_dense()]


def storages_of(tensors: Iterable[Tensor]) -> dict[int, torch.UntypedStorage]:
    """Return the storages that tensors use, by address."""
    storages = (part.untyped_storage() for tensor in tensors for part in strided_parts(tensor))
    return {storage.data_ptr(): storage for storage in storages}


def is_plain(tensor: Tensor) -> bool:
    """Return whether a tensor is strided, with a storage of its own."""
    return tensor.layout is torch.strided and not is_traceable_wrapper_subclass(tensor)


def writable(tensor: Tensor) -> bool:
    """Return whether numbers can be copied into it: it is dense, each entry in its own place."""
    return tensor.layout is torch.strided and not any(
        stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)
    )
