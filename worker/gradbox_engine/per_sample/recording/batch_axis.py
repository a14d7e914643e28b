"""Which dim of a tensor holds the samples.

Shapes: B samples.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class BatchAxis:
    """Dim `dim` has `before` · B · `after` entries, in that order."""

    dim: int
    before: int = 1
    after: int = 1

    @property
    def merged(self) -> bool:
        """Whether the samples share their dim."""
        return self.before * self.after > 1

    def length(self, samples: int) -> int:
        """Return how long dim `dim` is for so many samples."""
        return self.before * samples * self.after

    def lead(self, x: Tensor, offset: int = 0) -> Tensor:
        """Return `x` with its samples on dim `offset`, what they were merged with behind them.

        Args:
            x: the tensor; `offset` dims that are not part of the layer's own tensor come first.
            offset: 1 for output gradients, whose first dim counts outputs.
        """
        dim = self.dim + offset
        if self.merged:
            size = x.shape[dim] // (self.before * self.after)
            split = x.reshape(*x.shape[:dim], self.before, size, self.after, *x.shape[dim + 1 :])
            return split.movedim(dim + 1, offset)
        return x if dim == offset else x.movedim(dim, offset)

    def alone(self, part: Tensor) -> Tensor:
        """Return one of the samples that `lead` put first as a batch of one."""
        dim = self.dim
        return part.flatten(dim, dim + 1) if self.merged else part.unsqueeze(dim)

    def back(self, led: Tensor) -> Tensor:
        """Return `x` of what `lead` made of it."""
        dim = self.dim
        if not self.merged:
            return led.movedim(0, dim)
        return led.movedim(0, dim + 1).flatten(dim, dim + 2)
