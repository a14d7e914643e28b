"""Losses and functions of torch's own that take a function, or have another way to their value."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import nn

from gradbox.tracing.torch_modules.assertions import record_assertion


def linear_cross_entropy(module: nn.LinearCrossEntropyLoss, input: Any, target: Any) -> Any:
    """Record the cross entropy of a linear layer; `options` save memory and change no value."""
    logits = module.linear(input)
    if module.out_features:
        logits = logits.unflatten(-1, (module.num_classes, *module.out_features))
    return _cross_entropy(
        logits,
        target,
        weight=module.weight,
        ignore_index=module.ignore_index,
        reduction=module.reduction,
        label_smoothing=module.label_smoothing,
    )


def cross_entropy_of_linear(
    input: Any,
    linear_weight: Any,
    target: Any,
    *,
    linear_bias: Any = None,
    options: Any = None,
    **more: Any,
) -> Any:
    """Record `linear_cross_entropy` for a weight of two dimensions."""
    two = linear_weight.dim() == 2
    record_assertion(two, "linear_cross_entropy: expected a linear_weight of two dimensions")
    return _cross_entropy(F.linear(input, linear_weight, linear_bias), target, **more)


def _cross_entropy(
    logits: Any, target: Any, *, ignore_index: int | None = None, **more: Any
) -> Any:
    ignored = -100 if ignore_index is None else ignore_index
    return F.cross_entropy(logits, target, ignore_index=ignored, **more)


def triplet_with_distance(
    module: nn.TripletMarginWithDistanceLoss, anchor: Any, positive: Any, negative: Any
) -> Any:
    """Record the triplet loss over a distance function."""
    return triplet(
        anchor,
        positive,
        negative,
        distance_function=module.distance_function,
        margin=module.margin,
        swap=module.swap,
        reduction=module.reduction,
    )


def triplet(
    anchor: Any,
    positive: Any,
    negative: Any,
    *,
    distance_function: Any = None,
    margin: float = 1.0,
    swap: bool = False,
    reduction: str = "mean",
) -> Any:
    """Record `triplet_margin_with_distance_loss`; the distance function is traced through."""
    one_rank = (anchor.dim() == positive.dim()) & (anchor.dim() == negative.dim())
    record_assertion(one_rank, "triplet_margin_with_distance_loss: expected three of one rank")
    distance = distance_function or torch.pairwise_distance
    to_negative = distance(anchor, negative)
    if swap:
        to_negative = torch.minimum(to_negative, distance(positive, negative))
    loss: Any = torch.clamp_min(margin + distance(anchor, positive) - to_negative, 0)
    if reduction == "none":
        return loss
    return loss.sum() if reduction == "sum" else loss.mean()


# By function, what records a call of it.
FORMULAS: Final[dict[Callable[..., Any], Callable[..., Any]]] = {
    F.triplet_margin_with_distance_loss: triplet,
    torch._is_all_true: torch.all,
}
if hasattr(F, "linear_cross_entropy"):  # torch 2.12 and older have none
    FORMULAS[F.linear_cross_entropy] = cross_entropy_of_linear
