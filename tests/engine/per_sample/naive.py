"""The answer by one backward pass for each sample and output, on the batched graph."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from gradbox_engine import shard_stream
from tests.device import native_recurrence, tolerance

TOLERANCE = tolerance(torch.float64)
"""Largest relative difference in float64."""


def outputs(model: nn.Module, inputs: Mapping[str, Tensor], *, seed: int = 0) -> Tensor:
    """Return z as (B, Y), under the stream of shard 0."""
    by_place = [x for name, x in inputs.items() if name.isdigit()]
    by_name = {name: x for name, x in inputs.items() if not name.isdigit()}
    with shard_stream(seed, 0, 0), native_recurrence():
        z: Tensor = model(*by_place, **by_name)
    return z.reshape(z.shape[0], -1)


def rows(value_BY: Tensor, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return name → (B, Y, *shape), one backward at a time."""
    found = {
        name: torch.zeros(*value_BY.shape, *p.shape, dtype=p.dtype, device=p.device)
        for name, p in parameters.items()
    }
    for b in range(value_BY.shape[0]):
        for y in range(value_BY.shape[1]):
            gradients = torch.autograd.grad(
                value_BY[b, y], list(parameters.values()), retain_graph=True, allow_unused=True
            )
            for name, gradient in zip(parameters, gradients, strict=True):
                if gradient is not None:
                    found[name][b, y] = gradient.to_dense()
    return found


def jacobian(model: nn.Module, inputs: Mapping[str, Tensor], *, seed: int = 0) -> dict[str, Tensor]:
    """Return name → (B, Y, *shape)."""
    return rows(outputs(model, inputs, seed=seed), dict(model.named_parameters()))


def flat(arrays: Mapping[str, Tensor], lead: int = 2) -> Tensor:
    """Return all parameters' arrays side by side, (B, Y, P), or (B, P) with `lead` 1."""
    return torch.cat([x.reshape(*x.shape[:lead], -1) for x in arrays.values()], -1)


def difference(found: Tensor, expected: Tensor) -> float:
    """Return ‖found − expected‖ / ‖expected‖; infinite where shapes differ or NaN appears."""
    if found.shape != expected.shape or bool(found.isnan().any()):
        return float("inf")
    return float((found - expected).norm() / expected.norm().clamp_min(1e-300))
