"""What is differentiated per sample: the loss's entries, or the entries of z.

Shapes: B samples over all shards, b of one, Y outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gradbox_engine.errors import BadReduction, BadSampleLoss


def rows_of(z: Tensor, index: int) -> Tensor:
    """Return z of one shard as (b, Y)."""
    return z.reshape(z.shape[0], -1)


@dataclass(frozen=True)
class OneAfterTheOther:
    """The losses of two runs of shards, the second of which begins with shard `first`."""

    others: SampleLoss
    own: SampleLoss
    first: int

    def __call__(self, z: Tensor, index: int) -> Tensor:
        if index < self.first:
            return self.others(z, index)
        return self.own(z, index - self.first)


def check_given_apart(
    own: Mapping[str, Any], others: Mapping[str, Any], counts: Sequence[int]
) -> None:
    """Refuse a tensor with one row a sample that both runs of shards would be cut from.

    Args:
        others: what the loss reads for the others in place of its own.
        counts: the samples of each run.

    Raises:
        BadReduction: there is one.
    """
    for name, value in own.items():
        rows = value.shape[0] if isinstance(value, Tensor) and value.dim() else -1
        if name not in others and rows in counts:
            raise BadReduction(
                f"loss_inputs[{name!r}]: expected {{group: tensor}}, got one tensor with {rows} "
                f"rows for groups of {counts[0]} and {counts[1]} samples; say whose rows they are"
            )


class SampleLoss:
    """The loss of one shard as (b, 1)."""

    def __init__(
        self, loss: Callable[..., Tensor], inputs: Mapping[str, Any], counts: Sequence[int]
    ) -> None:
        self._loss, self._inputs = loss, inputs
        self._starts = [sum(counts[:index]) for index in range(len(counts))]
        self._total = sum(counts)

    def __call__(self, z: Tensor, index: int) -> Tensor:
        start = self._starts[index]
        mine = {}
        for name, value in self._inputs.items():
            if isinstance(value, Tensor):
                value = value.to(z.device)
                if value.dim() and value.shape[0] == self._total:
                    value = value[start : start + z.shape[0]]
                if value.is_floating_point() and z.dtype == torch.float64:
                    value = value.double()
            mine[name] = value
        losses = self._loss(z, **mine)
        if not isinstance(losses, Tensor) or losses.shape != z.shape[:1]:
            got = tuple(losses.shape) if isinstance(losses, Tensor) else type(losses).__name__
            raise BadSampleLoss(
                f"the loss: expected one number a sample, shape ({z.shape[0]},), got {got}; do not "
                "sum or average over samples"
            )
        return losses[:, None]
