"""What is differentiated per sample: the loss's entries, or the entries of z.

float16 ends at 6e-8, so the rows of a small loss would be rough, and then zero. Where the model has
such parameters, or runs under its autocast, sample b's loss is multiplied by the power of two s_b
that brings ‖∂ℓ_b/∂z‖ to about 16; samples are independent, so row b is s_b times too large, and is
divided in the parameters' dtype. The norm and not the largest entry, for a layer may add the
gradients of very many outputs. A shard in which a sample's gradient overflows runs again, with a
smaller scale for that sample; what is infinite at each is so in any precision. Cost: the loss's own
backward pass once more, and two passes over the factors.

Rows of float16 parameters that are not reduced are float16 again, and so are the output gradients
that they are made of: they lose digits below 6e-5, are zero below 3e-8 and infinite beyond 65504,
also where their product with the input would not be.

Shapes: B samples over all shards, b of one, Y outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gradbox_engine.errors import BadReduction, BadSampleLoss
from gradbox_engine.per_sample.backward import RecordedGraph
from gradbox_engine.replay.cotangents import refuse_constant
from gradbox_factors import Block, Convolution, Lookup, Outer, Positions, Term, Total
from gradbox_factors.term import Identity, identity, wide

_NORM_EXPONENT = 4.0
_LARGEST_EXPONENT = 100.0
_STEP, _MOST_STEPS = 6.0, 5


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


class Scaled:
    """A loss of a shard as (b, 1), scaled for every sample; divides terms by the scales."""

    def __init__(self, loss: SampleLoss) -> None:
        self._loss = loss
        self._scales = self._losses = torch.empty(0)
        self._tried = torch.empty(0)  # how many scales of each sample were too large
        self._index = -1

    def __call__(self, z: Tensor, index: int, first: int = 0) -> Tensor:
        losses = self._loss(z, index, first)
        if not torch.is_grad_enabled():
            # Losses of another z are compared with those of the graph, so have the same scales.
            scales = self._scales[first : first + len(losses), None]
            return losses * scales if index == self._index else losses
        slope = None
        if losses.requires_grad and z.requires_grad:
            (slope,) = torch.autograd.grad(losses.sum(), z, retain_graph=True, allow_unused=True)
        if index != self._index:
            self._index, self._tried = index, z.new_zeros(len(z))
        scales = _scales(slope, len(z)).to(z.device)
        steps = self._tried % (_MOST_STEPS + 1)
        self._scales, self._losses = scales * (-_STEP * steps).exp2(), losses.detach()[:, 0]
        return losses * self._scales[:, None]

    @property
    def losses(self) -> Tensor:
        """The losses of the last shard without scales, (b,)."""
        return self._losses

    def overflown(self, terms: Mapping[str, Term]) -> bool:
        """Lower the scales of samples whose terms overflowed; say whether to run them again.

        A sample that overflows at all scales has its first one, the best for what is finite.
        """
        finite = torch.ones_like(self._tried, dtype=torch.bool)
        for term in terms.values():
            for factor, dim in _output_gradients(term):
                finite &= factor.isfinite().movedim(dim, 0).flatten(1).all(1)
        again = ~finite & (self._tried <= _MOST_STEPS) & self._losses.isfinite()
        self._tried = self._tried + again
        return bool(again.any())

    def unscaled(self, terms: Mapping[str, Term], *, wide_rows: bool) -> dict[str, Term]:
        """Return the last shard's terms without the scales; terms that share a factor still do.

        Args:
            wide_rows: whether they come in float32 or wider, to be reduced.
        """
        scaled: dict[Identity, Tensor] = {}
        weighted = partial(_weighted, weights=1 / self._scales, scaled=scaled, wide_rows=wide_rows)
        return {name: weighted(term) for name, term in terms.items()}


def pulled_back(graph: RecordedGraph, cotangents: Tensor, *, scaled: bool) -> dict[str, Tensor]:
    """Return Jᵀ u by parameter, u of shape (b, Y).

    Args:
        scaled: whether u is multiplied by one scale, and again by smaller ones where a gradient
            overflows; by the first one where all do.
    """
    cotangents = cotangents.to(graph.value)
    if not scaled:
        return graph.pulled_back(cotangents)
    first = float(_scales(cotangents, 1))
    for step in (*range(_MOST_STEPS + 1), 0):
        scale = first * 2.0 ** (-_STEP * step)
        found = graph.pulled_back(cotangents * scale, keep_graph=True)
        if all(bool(gradient.isfinite().all()) for gradient in found.values()):
            break
    graph.free()
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


def _weighted(
    term: Term, *, weights: Tensor, scaled: dict[Identity, Tensor], wide_rows: bool
) -> Term:
    """Return the term with every sample's row times its weight, `weights` of shape (b,)."""
    if isinstance(term, Total):
        again = partial(_weighted, weights=weights, scaled=scaled, wide_rows=wide_rows)
        return Total(tuple(again(part) for part in term.terms))
    if isinstance(term, Block):
        array = _scaled_along(term.array, weights, 0)
        return replace(term, array=array if wide_rows else array.to(term.dtype))
    if isinstance(term, Outer | Lookup | Positions | Convolution):
        key = identity(term.left)
        if key not in scaled:
            left = _scaled_along(term.left, weights, 1)
            scaled[key] = left if wide_rows else left.to(term.dtype)
        if wide_rows and isinstance(term, Outer | Convolution):
            term = replace(term, right=wide(term.right))
        return replace(term, left=scaled[key])
    return term


def _output_gradients(term: Term) -> list[tuple[Tensor, int]]:
    """Return the factors made of output gradients, each with its dim of samples."""
    if isinstance(term, Total):
        return [found for part in term.terms for found in _output_gradients(part)]
    if isinstance(term, Block):
        return [(term.array, 0)]
    if isinstance(term, Outer | Lookup | Positions | Convolution):
        return [(term.left, 1)]
    return []


def _scaled_along(x: Tensor, weights: Tensor, dim: int) -> Tensor:
    sizes: list[Any] = [1] * x.dim()
    sizes[dim] = -1
    # In float32 or wider: a weight below 3e-8 is zero in float16, and its product may not be.
    return x * weights.to(wide(x[:0])).view(sizes)
