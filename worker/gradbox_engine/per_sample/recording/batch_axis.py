"""Which dim of a tensor holds the samples: found from two runs, not from a shape that may coincide.

A tensor of a run on B samples and the same tensor of a run on B + `EXTRA` samples differ in at most
one dim: that dim holds the samples, alone (B against B + EXTRA) or merged with others (m·B against
m·(B + EXTRA)). For a merged dim the order is settled by a third run in which one sample differs,
and where that leaves several (none differs in a mask that is repeated for every sample), by the
samples that the first two runs share. Where all numbers are alike, samples are taken to be as far
out as they may, and the axis is a guess: the rows of every shard are then compared with autograd's.

Shapes: B samples.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gradbox_engine.model.tensor_equality import equal_numbers

EXTRA = 1
CHANGED = 1
"""The sample that differs in the third run: samples before it and behind it may see it."""


@dataclass(frozen=True)
class BatchAxis:
    """Dim `dim` has `before` · B · `after` entries, in that order."""

    dim: int
    before: int = 1
    after: int = 1
    guessed: bool = False  # whether other orders are possible

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


def changed_dim(first: torch.Size, second: torch.Size) -> int | None:
    """Return the one dim in which two shapes differ, None where they are equal, -1 otherwise."""
    if len(first) != len(second):
        return -1
    dims = [dim for dim, (a, b) in enumerate(zip(first, second, strict=True)) if a != b]
    if not dims:
        return None
    return dims[0] if len(dims) == 1 else -1


def find(first: Tensor, second: Tensor, third: Tensor, samples: int) -> BatchAxis | None:
    """Return which dim of a tensor holds the samples, None if that cannot be told.

    Args:
        first: the tensor in a run on `samples` samples.
        second: the same in a run on `samples + EXTRA`.
        third: the same as `second`, with sample `CHANGED` replaced.
    """
    dim = changed_dim(first.shape, second.shape)
    if dim is None or dim < 0:
        return None
    size, larger = first.shape[dim], second.shape[dim]
    copies, rest = divmod(size, samples)
    if rest or larger != copies * (samples + EXTRA):
        return None
    if copies == 1:
        return BatchAxis(dim)
    return _order(first, second, third, dim, copies)


def _order(first: Tensor, second: Tensor, third: Tensor, dim: int, copies: int) -> BatchAxis | None:
    """Settle how a merged dim is laid out: every position that differs must be sample `CHANGED`."""
    if second.shape != third.shape:
        return None
    orders = [BatchAxis(dim, n, copies // n) for n in range(1, copies + 1) if not copies % n]
    fitting = [axis for axis in orders if others_equal(second, third, axis)]
    if len(fitting) > 1:
        fitting = [axis for axis in fitting if _samples_repeat(first, second, axis)] or fitting
    return replace(fitting[0], guessed=len(fitting) > 1) if fitting else None


def _samples_repeat(first: Tensor, second: Tensor, axis: BatchAxis) -> bool:
    """Return whether the samples of the first run have the same numbers in the second, nearly."""
    shorter, longer = axis.lead(first), axis.lead(second)
    return torch.allclose(shorter, longer[: len(shorter)], rtol=1e-2, equal_nan=True)


def others_equal(second: Tensor, third: Tensor, axis: BatchAxis) -> bool:
    """Return whether two tensors have the same numbers for all samples but `CHANGED`."""
    led = axis.lead(second), axis.lead(third)
    others = slice(CHANGED), slice(CHANGED + 1, None)
    return all(equal_numbers(*(x[part] for x in led)) for part in others)


def samples_that_differ(second: Tensor, third: Tensor, axis: BatchAxis) -> Tensor:
    """Return for every sample whether its part of the tensor differs beyond rounding, (B,) bool.

    Each entry has a scale of its own, the largest finite number that a sample has there: with one
    scale, logits masked with -1e9 would hide all other differences. Both tensors are from calls of
    one shape, whose roundings agree unless kernels add in no fixed order or data choose a kernel.
    """
    first_B, second_B = (
        axis.lead(x).reshape(second.shape[axis.dim] // (axis.before * axis.after), -1)
        for x in (second, third)
    )
    if not first_B.is_floating_point():
        return (first_B != second_B).any(1)
    limits = torch.finfo(first_B.dtype)
    scale = first_B.abs().nan_to_num(0.0, 0.0).amax(0).clamp_min(limits.tiny)
    roundings = 1e3 if limits.eps < 1e-4 else 2  # a thousand 16-bit roundings would hide all
    differ = (first_B - second_B).abs() > roundings * limits.eps * scale
    return (differ | (first_B.isnan() != second_B.isnan())).any(1)
