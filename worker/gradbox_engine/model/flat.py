"""Several tensors of one dtype and device in one flat tensor.

Where many small ones are copied together, a tensor each would cost more than what is in it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors


@dataclass(frozen=True)
class Layout:
    """Where each of several tensors lies in the flat one."""

    shapes: tuple[torch.Size, ...]
    sizes: tuple[int, ...]

    @classmethod
    def of(cls, tensors: Sequence[Tensor]) -> Layout:
        """Return how `flattened` lays these out."""
        shapes = tuple(tensor.shape for tensor in tensors)
        return cls(shapes, tuple(map(math.prod, shapes)))

    def parts(self, flat: Tensor) -> list[Tensor]:
        """Return the tensors' values, as views."""
        pieces = flat.split(self.sizes)  # type: ignore[no-untyped-call]
        return [
            piece if len(shape) == 1 else piece.view(shape)
            for piece, shape in zip(pieces, self.shapes, strict=True)
        ]


@torch.no_grad()
def flattened(tensors: Sequence[Tensor]) -> Tensor:
    """Return a flat copy of all of them, one behind the other."""
    flat: Tensor = _flatten_dense_tensors(tensors)  # type: ignore[no-untyped-call]
    return flat.clone() if len(tensors) == 1 else flat  # one alone comes as a view
