"""How tensors lay in memory before they were written to a file, and there again behind it.

A file has a tensor's numbers in row-major order. A product, or a sum over a dim, may round
otherwise where its operand is laid out otherwise, were it only by gaps: the dot product of every
second number takes another kernel than that of neighbours.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from gradbox.errors import InvalidInputs


def strides_of(tensors: Mapping[str, Tensor]) -> dict[str, list[int]]:
    """Return the strides of the tensors that do not lie in row-major order without gaps.

    Of a tensor whose rows overlap in memory there are none. It is read in row-major order.

    Raises:
        InvalidInputs: a tensor has no strides.
    """
    for name, tensor in tensors.items():
        if tensor.layout is not torch.strided or tensor.is_nested:
            raise InvalidInputs(
                f"expected tensors with strides, which a file can hold, got {name!r} of "
                f"{tensor.layout}"
            )
    return {
        name: list(tensor.stride())
        for name, tensor in tensors.items()
        if tensor.stride() != _row_major(tensor.shape) and not _overlaps(tensor)
    }


def laid_out(tensor: Tensor, strides: Sequence[int] | None) -> Tensor:
    """Return a copy with these strides; None is row-major order."""
    if strides is None:
        return tensor.clone(memory_format=torch.contiguous_format)
    copy = torch.empty_strided(tensor.shape, tuple(strides), dtype=tensor.dtype)
    whole = copy
    for dim, stride in enumerate(strides):
        if stride == 0:  # an expanded dim, whose entries are one number in memory
            copy, tensor = copy.narrow(dim, 0, 1), tensor.narrow(dim, 0, 1)
    copy.copy_(tensor)
    return whole


def _row_major(shape: torch.Size) -> tuple[int, ...]:
    return torch.empty(shape, device="meta").stride()


def _overlaps(tensor: Tensor) -> bool:
    """Return whether two entries may be one number in memory, expanded dims aside."""
    reached = 0  # how far the dims so far go
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if stride and size > 1:
            if stride <= reached:
                return True
            reached += stride * (size - 1)
    return False
