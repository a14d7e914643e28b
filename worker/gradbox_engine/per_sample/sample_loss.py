"""What is differentiated per sample: the loss's entries, or the entries of z.

Shapes: B samples over all shards, b of one, Y outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gradbox_engine.errors import BadReduction, BadSampleLoss
from gradbox_engine.replay.cotangents import refuse_constant


def rows_of(z: Tensor, index: int, first: int = 0) -> Tensor:
    """Return z of one shard as (b, Y)."""
    return z.reshape(z.shape[0], -1)


def check_given_apart(
    own: Mapping[str, Any], others: Mapping[str, Any], counts: Sequence[int]
) -> None:
    """Refuse a tensor with one row a sample that both groups of shards would be cut from.

    Args:
        others: what the loss reads for the other group in place of its own.
        counts: the samples of each group.

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
    """The loss of one shard as (b, 1), or of some of its samples from `first` on."""

    def __init__(
        self,
        loss: Callable[..., Tensor],
        inputs: Mapping[str, Any],
        counts: Sequence[int],
        *,
        by_sample: Collection[str] | None = None,
    ) -> None:
        self._loss, self._inputs = loss, inputs
        self._starts = [sum(counts[:index]) for index in range(len(counts))]
        self._cut = rows_by_sample(inputs, sum(counts)) if by_sample is None else set(by_sample)

    def __call__(self, z: Tensor, index: int, first: int = 0) -> Tensor:
        start = self._starts[index] + first
        mine = {}
        for name, value in self._inputs.items():
            if isinstance(value, Tensor):
                if name in self._cut:
                    value = value[start : start + z.shape[0]]
                value = value.to(z.device)
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
        if z.requires_grad and torch.is_grad_enabled():
            refuse_constant(losses, called="the loss")
        return losses[:, None]


def rows_by_sample(inputs: Mapping[str, Any], samples: int) -> set[str]:
    """Return the names of the tensors that have one row a sample, by their number of rows."""
    return {
        name
        for name, value in inputs.items()
        if isinstance(value, Tensor) and value.dim() and value.shape[0] == samples
    }
