"""Distributions of `torch.distributions`, where they choose by the rank of an argument.

A density, an entropy or a divergence is traced through as it stands, and what torch validates is
asserted on the box. Recorded here is what asks for a rank, which a symbol has not, to no end but a
check or the shape of an argument without dimensions.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributions import Distribution

from gradbox.tracing.source_location import untraceable
from gradbox.tracing.torch_modules.formulas import record_assertion


def validate_sample(distribution: Distribution, value: Any) -> None:
    """Record that a value has the distribution's event shape and lies within its support."""
    try:
        support: Any = distribution.support
    except NotImplementedError:  # as torch does, but for its warning
        return
    name, event_shape = type(distribution).__name__, distribution.event_shape
    begin = len(value.size()) - len(event_shape)
    record_assertion(value.size()[begin:] == event_shape, f"{name}: expected another event shape")
    record_assertion(torch.all(support.check(value)), f"{name}: a value is outside its support")


def categorical(
    distribution: Any, probs: Any = None, logits: Any = None, validate_args: bool | None = None
) -> None:
    """Make a categorical distribution."""
    if (probs is None) == (logits is None):
        raise ValueError("Categorical: expected either probs or logits")
    if probs is not None:
        distribution.probs = distribution._param = probs / probs.sum(-1, keepdim=True)
    else:
        distribution.logits = distribution._param = logits - logits.logsumexp(-1, keepdim=True)
    sizes = distribution._param.size()
    distribution._num_events = sizes[-1]
    Distribution.__init__(distribution, sizes[:-1], validate_args=validate_args)


def mixture(
    distribution: Any,
    mixture_distribution: Any,
    component_distribution: Any,
    validate_args: bool | None = None,
) -> None:
    """Make a mixture; that the batches of its two parts fit shows when they meet."""
    distribution._mixture_distribution = mixture_distribution
    distribution._component_distribution = component_distribution
    num, sizes = mixture_distribution.logits.shape[-1], component_distribution.batch_shape
    record_assertion(sizes[-1] == num, "MixtureSameFamily: expected as many components as weights")
    distribution._num_component = num
    event_shape = component_distribution.event_shape
    distribution._event_ndims = len(event_shape)
    Distribution.__init__(distribution, sizes[:-1], event_shape, validate_args=validate_args)


def transformed(
    distribution: Any, base_distribution: Any, transforms: Any, validate_args: bool | None = None
) -> None:
    """Make a distribution of entries that are transformed one by one."""
    listed = transforms if isinstance(transforms, list) else [transforms]
    if any(part.domain.event_dim or part.codomain.event_dim for part in listed):
        raise untraceable(
            f"{type(distribution).__name__} transforms entries together",
            "write its density with torch functions",
        )
    distribution.base_dist, distribution.transforms = base_distribution, listed
    shapes = base_distribution.batch_shape, base_distribution.event_shape
    Distribution.__init__(distribution, *shapes, validate_args=validate_args)


def log_prob_of_gamma(distribution: Any, value: Any) -> Any:
    """Record the density of a gamma distribution, which torch begins with `as_tensor`."""
    rate, shape = distribution.rate, distribution.concentration
    value = value.to(rate.dtype)
    if distribution._validate_args:
        validate_sample(distribution, value)
    density = torch.xlogy(shape, rate) + torch.xlogy(shape - 1, value)
    return density - rate * value - torch.lgamma(shape)
