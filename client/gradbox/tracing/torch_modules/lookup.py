"""Bags of embeddings, and the softmax that keeps rare classes in clusters.

The kernel of `F.embedding_bag` reads where indices and offsets point. Recorded, a bag is a sum over
the rows of `F.embedding`, which checks its indices, and the offsets are asserted to be in order.
B bags, N indices, D features.

`nn.AdaptiveLogSoftmaxWithLoss` looks up which clusters its targets name, and passes over the
others. Recorded, it computes all of them: the value and the gradients are the same, at the cost of
the full softmax.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from gradbox.tracing.source_location import untraceable
from gradbox.tracing.torch_modules.assertions import of_rank, record_assertion


def embedding_bag(
    module: nn.EmbeddingBag, input: Any, offsets: Any = None, per_sample_weights: Any = None
) -> Any:
    """Record the sum, mean or largest entries of the embeddings of each bag."""
    if module.max_norm is not None:
        raise untraceable("nn.EmbeddingBag(max_norm=...) rescales its weight", "leave max_norm out")
    if module.scale_grad_by_freq:  # torch's own miscounts on a CPU (2.13): see its counts_uniq
        raise untraceable(
            "nn.EmbeddingBag(scale_grad_by_freq=True) has no one gradient", "leave it out"
        )
    if per_sample_weights is not None and module.mode != "sum":
        raise ValueError("nn.EmbeddingBag: expected mode='sum' with per_sample_weights")
    bags_N, num_bags = _bags(module, input, offsets)
    ids_N = input.reshape(-1)
    rows_ND: Any = F.embedding(ids_N, module.weight, module.padding_idx)
    counted_N = ids_N == ids_N if module.padding_idx is None else ids_N != module.padding_idx
    if module.mode == "max":
        return _largest(rows_ND, counted_N, bags_N, num_bags)
    weights_N = counted_N.to(module.weight.dtype)
    if per_sample_weights is not None:
        weights_N = weights_N * per_sample_weights.reshape(-1)
    sums_BD = rows_ND.new_zeros((num_bags, module.embedding_dim)).index_add(
        0, bags_N, rows_ND * weights_N.unsqueeze(1)
    )
    if module.mode == "sum":
        return sums_BD
    counts_B = weights_N.new_zeros((num_bags,)).index_add(0, bags_N, weights_N)
    return sums_BD / counts_B.clamp(min=1).unsqueeze(1)


def _bags(module: nn.EmbeddingBag, input: Any, offsets: Any) -> tuple[Any, Any]:
    """Return each index's bag, and the number of bags."""
    of_rank(2 if offsets is None else 1)(module, input)
    if offsets is None:
        rows, length = input.size(0), input.size(1)
        return torch.arange(rows).unsqueeze(1).expand((rows, length)).reshape(-1), rows
    of_rank(1)(module, offsets)
    last = offsets[-1] == input.size(0) if module.include_last_offset else True
    in_order = (offsets[1:] >= offsets[:-1]).all() & (offsets <= input.size(0)).all()
    message = "EmbeddingBag: expected offsets from 0 to the number of indices, in order"
    record_assertion(in_order & (offsets[0] == 0) & last, message)
    positions_N = torch.arange(input.size(0)).type_as(offsets)
    bags_N = torch.searchsorted(offsets, positions_N, right=True) - 1
    return bags_N, offsets.size(0) - (1 if module.include_last_offset else 0)


def _largest(rows_ND: Any, counted_N: Any, bags_N: Any, num_bags: Any) -> Any:
    """Return the largest entries of each bag, 0 where it is empty; the first of equals counts."""
    num, shape = rows_ND.size(0), (num_bags, rows_ND.size(1))
    bags_ND = bags_N.unsqueeze(1).expand_as(rows_ND)
    known_ND = rows_ND.detach().masked_fill(~counted_N.unsqueeze(1), -torch.inf)
    largest_BD = known_ND.new_full(shape, -torch.inf).scatter_reduce(0, bags_ND, known_ND, "amax")
    found_ND = (known_ND == largest_BD.gather(0, bags_ND)) & counted_N.unsqueeze(1)
    at_ND = torch.where(found_ND, torch.arange(num).unsqueeze(1), num)
    first_BD = at_ND.new_full(shape, num).scatter_reduce(0, bags_ND, at_ND, "amin")
    return F.pad(rows_ND, (0, 0, 0, 1)).gather(0, first_BD)


def adaptive_softmax(module: nn.AdaptiveLogSoftmaxWithLoss, input_: Any, target_: Any) -> Any:
    """Record the log probability of each target, and the mean of its negative."""
    log_prob = adaptive_log_prob(module, input_)
    output = log_prob.gather(-1, target_.unsqueeze(-1)).squeeze(-1)
    return _Output(output, (-output).mean())


def adaptive_log_prob(module: nn.AdaptiveLogSoftmaxWithLoss, input: Any) -> Any:
    """Record the log probabilities of all classes."""
    head: Any = F.log_softmax(module.head(input), dim=-1)
    parts = [head[..., : module.shortlist_size]]
    for i, tail in enumerate(module.tail):
        cluster = head[..., module.shortlist_size + i].unsqueeze(-1)
        parts.append(F.log_softmax(tail(input), dim=-1) + cluster)
    return torch.cat(parts, -1)


_Output: Any = nn.modules.adaptive._ASMoutput
