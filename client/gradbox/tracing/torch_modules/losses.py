"""Losses of torch's own that take a function, or choose between two ways to one value."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from gradbox.tracing.torch_modules.assertions import record_assertion


def linear_cross_entropy(module: nn.LinearCrossEntropyLoss, input: Any, target: Any) -> Any:
    """Record the cross entropy of a linear layer; `options` save memory and change no value."""
    logits = module.linear(input)
    if module.out_features:
        logits = logits.unflatten(-1, (module.num_classes, *module.out_features))
    return F.cross_entropy(
        logits,
        target,
        weight=module.weight,
        ignore_index=-100 if module.ignore_index is None else module.ignore_index,
        reduction=module.reduction,
        label_smoothing=module.label_smoothing,
    )


def triplet_with_distance(
    module: nn.TripletMarginWithDistanceLoss, anchor: Any, positive: Any, negative: Any
) -> Any:
    """Record the triplet loss over a distance function, which is traced through."""
    one_rank = (anchor.dim() == positive.dim()) & (anchor.dim() == negative.dim())
    record_assertion(one_rank, "TripletMarginWithDistanceLoss: expected three of one rank")
    distance = module.distance_function or torch.pairwise_distance
    to_negative = distance(anchor, negative)
    if module.swap:
        to_negative = torch.minimum(to_negative, distance(positive, negative))
    loss: Any = torch.clamp_min(module.margin + distance(anchor, positive) - to_negative, 0)
    if module.reduction == "none":
        return loss
    return loss.sum() if module.reduction == "sum" else loss.mean()
