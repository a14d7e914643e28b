"""Gradients that float16 can hold: the loss of every sample is scaled, its row divided again.

float16 ends at 6e-8, so the rows of a small loss would be rough, and then zero. Sample b's loss is
multiplied by the power of two s_b that brings ‖∂ℓ_b/∂z‖ to about 16; samples do not meet on the way
back, so row b is s_b times too large, and is divided in the parameters' dtype. The norm and not the
largest entry, for a layer may add the slopes of very many outputs.

A sample whose gradient overflows on its way is tried again with a smaller scale, with its shard.

Cost: the loss's own backward pass once more, and two passes over the factors.

Shapes: b samples of a shard.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from gradbox_engine.per_sample.backward import Traced
from gradbox_factors import Block, Convolution, Lookup, Outer, Positions, Term, Total
from gradbox_factors.term import Identity, identity

_NORM_EXPONENT = 4.0
_LARGEST_EXPONENT = 100.0
_STEP, _MOST_STEPS = 6.0, 5


class Scaled:
    """A loss (z, shard) → (b, 1), scaled for every sample; takes the scales off terms again."""

    def __init__(self, loss: Callable[[Tensor, int], Tensor]) -> None:
        self._loss = loss
        self._scales = self._losses = self._lowered = torch.empty(0)
        self._index = -1

    def __call__(self, z: Tensor, index: int) -> Tensor:
        z = z.float()
        losses = self._loss(z, index)
        if not torch.is_grad_enabled():
            # Whoever compares losses of other z with those of the graph has them at its scales.
            return losses * self._scales[:, None] if index == self._index else losses
        slope = None
        if losses.requires_grad and z.requires_grad:
            (slope,) = torch.autograd.grad(losses.sum(), z, retain_graph=True, allow_unused=True)
        if index != self._index:
            self._index, self._lowered = index, z.new_zeros(len(z))
        scales = _scales(slope, len(z)).to(z.device)
        self._scales, self._losses = scales * (-_STEP * self._lowered).exp2(), losses.detach()[:, 0]
        return losses * self._scales[:, None]

    @property
    def losses(self) -> Tensor:
        """The losses of the last shard as they are, (b,)."""
        return self._losses

    def overflown(self, terms: Mapping[str, Term]) -> bool:
        """Lower the scales of samples whose terms overflowed; say whether to run them again."""
        finite = torch.ones_like(self._lowered, dtype=torch.bool)
        for term in terms.values():
            for factor, dim in _carrying(term):
                finite &= factor.isfinite().movedim(dim, 0).flatten(1).all(1)
        lower = ~finite & (self._lowered < _MOST_STEPS) & self._losses.isfinite()
        self._lowered = self._lowered + lower
        return bool(lower.any())

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
    flat = slope.reshape(samples, -1)
    largest = flat.abs().amax(1)
    # Squares of what is divided by the largest do not underflow.
    norm = largest * torch.linalg.vector_norm(flat / largest[:, None], dim=1)
    exponents = _NORM_EXPONENT - norm.log2().round()
    exponents = exponents.clamp(-_LARGEST_EXPONENT, _LARGEST_EXPONENT)
    fits = (largest > 0) & norm.isfinite()
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


def _carrying(term: Term) -> list[tuple[Tensor, int]]:
    """Return the factors that carry the gradient, each with its dim of samples."""
    if isinstance(term, Total):
        return [found for part in term.terms for found in _carrying(part)]
    if isinstance(term, Block):
        return [(term.array, 0)]
    if isinstance(term, Outer | Lookup | Positions | Convolution):
        return [(term.left, 1)]
    return []


def _times(x: Tensor, weights: Tensor, dim: int) -> Tensor:
    sizes: list[Any] = [1] * x.dim()
    sizes[dim] = -1
    return x * weights.to(x.dtype).view(sizes)
