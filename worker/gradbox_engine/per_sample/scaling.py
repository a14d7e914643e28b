"""Gradients that float16 can hold: the loss of every sample is scaled, its row divided again.

float16 ends at 6e-8, so the rows of a small loss would be rough, and then zero. Sample b's loss is
multiplied by the power of two s_b that brings max |∂ℓ_b/∂z| to about 1; samples do not meet on the
way back, so row b is s_b times too large, and is divided in the parameters' dtype.

Cost: the loss's own backward pass once more, and a pass over the factors.
Not done: a scale is not tried again when a gradient overflows on its way; the row shows it.

Shapes: b samples of a shard.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from gradbox_engine.per_sample.factoring import Traced
from gradbox_factors import Block, Convolution, Lookup, Outer, Positions, Term, Total
from gradbox_factors.term import Identity, identity

_LARGEST_EXPONENT = 100.0


class Scaled:
    """A loss (z, shard) → (b, 1), scaled for every sample; takes the scales off terms again."""

    def __init__(self, loss: Callable[[Tensor, int], Tensor]) -> None:
        self._loss = loss
        self._scales = self._losses = torch.empty(0)

    def __call__(self, z: Tensor, index: int) -> Tensor:
        z = z.float()
        losses = self._loss(z, index)
        if not (torch.is_grad_enabled() and losses.requires_grad):
            return losses
        (slope,) = torch.autograd.grad(losses.sum(), z, retain_graph=True, allow_unused=True)
        self._scales, self._losses = _scales(slope, len(z)).to(z.device), losses.detach()[:, 0]
        return losses * self._scales[:, None]

    @property
    def losses(self) -> Tensor:
        """The losses of the last shard as they are, (b,)."""
        return self._losses

    def unscaled(self, terms: Mapping[str, Term]) -> dict[str, Term]:
        """Return the last shard's terms without the scales; what shares a factor goes on to."""
        known: dict[Identity, Tensor] = {}
        return {name: _weighted(term, 1 / self._scales, known) for name, term in terms.items()}


def pulled_back(traced: Traced, cotangents: Tensor) -> dict[str, Tensor]:
    """Return Jᵀ u by parameter, u of shape (b, Y); under float16 by way of u times one scale."""
    if traced.session.rounding != torch.float16:
        return traced.pulled_back(cotangents.to(traced.value))
    wide = cotangents.to(traced.value.device, torch.float32)
    scale = _scales(wide, 1).to(wide.device)
    found = traced.pulled_back((wide * scale).to(traced.value))
    return {name: gradient / scale for name, gradient in found.items()}


def _scales(slope: Tensor | None, samples: int) -> Tensor:
    """Return the power of two for each sample, 1 where its slope is zero or not finite."""
    if slope is None:
        return torch.ones(samples)
    largest = slope.reshape(samples, -1).abs().amax(1)
    exponents = -largest.log2().round().clamp(-_LARGEST_EXPONENT, _LARGEST_EXPONENT)
    fits = (largest > 0) & largest.isfinite()
    return torch.where(fits, exponents, 0.0).exp2()


def _weighted(term: Term, weights: Tensor, known: dict[Identity, Tensor]) -> Term:
    """Return the term with every sample's row times its weight, `weights` of shape (b,)."""
    if isinstance(term, Total):
        return Total(tuple(_weighted(part, weights, known) for part in term.terms))
    if isinstance(term, Block):
        return replace(term, array=_times(term.array, weights, 0))
    if isinstance(term, Outer | Lookup | Positions | Convolution):
        key = identity(term.left)
        if key not in known:
            known[key] = _times(term.left, weights, 1)
        return replace(term, left=known[key])
    return term


def _times(x: Tensor, weights: Tensor, dim: int) -> Tensor:
    sizes: list[Any] = [1] * x.dim()
    sizes[dim] = -1
    return x * weights.to(x.dtype).view(sizes)
