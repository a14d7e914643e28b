"""Rows are compared with autograd's gradient on the graph that they were drawn from.

With weights w_by of either sign, drawn from the job's seed:

    Σ_by w_by r_by  =  ∂(Σ_by w_by v_by)/∂θ,     r the rows, v the losses or the entries of z

for each parameter. The left side is linear in the rows and the weights differ from sample to
sample, so one wrong row, rows in another order, a use of a parameter that was not recorded, and one
sample's dependence on another all change it. Samples count alike: their weights are divided by the
norm of ∂v_b/∂z_b. Both sides come from one forward pass, so ReLU kinks and dropout masks are the
same and only rounding may differ.

The rows come from a backward pass without weights. Where ℓ_c depends on features h_b of another
sample, row b holds Σ_c ∂ℓ_c/∂h_b, all of it weighted with w_b, and autograd's gradient weights each
∂ℓ_c/∂h_b with w_c: they differ unless it is zero. A dependence without a derivative is not seen.

A gradient of zero confirms nothing, nor does one that overflows.

Cost: one backward pass, and the rows' weighted sum from the factors.

Shapes: B samples, Y outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from math import hypot, isfinite, sqrt

import torch
from torch import Tensor

from gradbox_engine.errors import CoupledSamples
from gradbox_engine.per_sample.planning.axis_search import samples_that_differ
from gradbox_engine.per_sample.recording.batch_axis import BatchAxis
from gradbox_factors import Term
from gradbox_factors.term import wide

TOLERANCE = {torch.float64: 1e-8, torch.float32: 2e-3, torch.bfloat16: 1e-1, torch.float16: 3e-2}
"""‖difference‖ over ‖gradient‖ of a parameter: wide, for sums over samples may cancel."""

_SIZES = 64  # how many different weights there are
_LARGEST_EXPONENT = 60.0  # of a sample's weight
_SMALLEST = 1e-15  # norm whose square float32 holds with all digits


@dataclass(frozen=True)
class Reference:
    """Autograd's gradient of the weighted sum, by parameter; None where no path leads to one."""

    weights: Tensor  # (B, Y)
    gradients: Mapping[str, Tensor | None]

    @property
    def empty(self) -> bool:
        """Whether no path leads to any of the parameters."""
        return all(gradient is None for gradient in self.gradients.values())


@dataclass(frozen=True)
class Comparison:
    """The parameters whose rows are not autograd's, and those whose rows were confirmed."""

    wrong: frozenset[str]
    confirmed: frozenset[str]


def check_head(z: Tensor, value: Tensor, head: Callable[[Tensor], Tensor]) -> None:
    """Replace one row of z, and see that the loss of no other sample changes.

    Args:
        value: what `head` gives for z.

    Raises:
        CoupledSamples: another's changed.
    """
    if z.shape[0] < 2:
        return
    sample = z.shape[0] // 2
    replaced = z.clone()
    replaced[sample] = z[sample - 1] + 0.1
    with torch.no_grad():
        differ = samples_that_differ(value, head(replaced), BatchAxis(0))
    differ[sample] = False
    if differ.any():
        raise CoupledSamples(
            "the loss of one sample changed when another sample's output did, so it has no "
            "gradient per sample: entry b of the loss may read row b of z alone"
        )


def reference(
    z: Tensor | None, value_BY: Tensor, parameters: Mapping[str, Tensor], *, seed: int
) -> Reference:
    """Return autograd's gradient of the weighted sum; keeps the graph.

    Args:
        z: in the graph, with samples leading; None where the rows are of its entries.
        value_BY: what the rows are of.
    """
    weights_BY = _weights(value_BY, seed)
    if z is not None:
        weights_BY = _over_slopes(weights_BY, z, value_BY)
    total = (value_BY * weights_BY).sum()
    gradients = torch.autograd.grad(
        total, list(parameters.values()), retain_graph=True, allow_unused=True
    )
    return Reference(weights_BY, dict(zip(parameters, gradients, strict=True)))


def compare(expected: Reference, terms: Mapping[str, Term], *, rounding: torch.dtype) -> Comparison:
    """Compare terms with autograd's gradient.

    Args:
        rounding: the narrowest dtype in which the model multiplies.
    """
    sizes = {
        name: 0.0 if gradient is None else _norm(gradient)
        for name, gradient in expected.gradients.items()
    }
    dtypes = {terms[name].dtype for name in sizes}
    # A gradient that is zero but for rounding (a key's bias before softmax) has no own scale.
    least = _rounding(dtypes | {rounding}) * _total(sizes.values())
    wrong, confirmed = set(), set()
    for name, gradient in expected.gradients.items():
        size = sizes[name]
        if not isfinite(size):
            continue
        term = terms[name]
        near = max(TOLERANCE[term.dtype], TOLERANCE[rounding])
        found = term.vjp(expected.weights.to(term.dtype)).detach()
        difference = _norm(found if gradient is None else found.sub_(gradient.detach()))
        if not (
            difference <= near * size + least
            or difference <= near * (size + _row_norm(term, expected.weights)) + least
        ):
            wrong.add(name)
        elif size > 0:
            confirmed.add(name)
    return Comparison(frozenset(wrong), frozenset(confirmed))


def _weights(value_BY: Tensor, seed: int) -> Tensor:
    """Return numbers of size 1/2 to 3/2 and either sign, which 16-bit dtypes hold exactly.

    Of one output, those of the first 64 samples all differ, as do those of the next 64.
    """
    generator = torch.Generator().manual_seed(seed % 2**63)
    samples, outputs = value_BY.shape
    blocks = -(-samples // _SIZES)
    order = torch.randperm(_SIZES, generator=generator)[:, None]
    shifts = torch.randint(_SIZES, (blocks, 1, outputs), generator=generator)
    drawn = ((order + shifts) % _SIZES).flatten(0, 1)[:samples] - _SIZES // 2
    weights_BY: Tensor = ((drawn + torch.where(drawn < 0, -16, 17)) / 32).to(value_BY)
    return weights_BY


def _over_slopes(weights_BY: Tensor, z: Tensor, value_BY: Tensor) -> Tensor:
    """Divide by each sample's norm of ∂v/∂z, rounded to a power of two."""
    (slope,) = torch.autograd.grad(value_BY.sum(), z, retain_graph=True, allow_unused=True)
    if slope is None:
        return weights_BY
    exponents = slope.reshape(slope.shape[0], -1).norm(dim=1).log2().round()
    exponents = exponents.nan_to_num(0.0, 0.0, 0.0).clamp(-_LARGEST_EXPONENT, _LARGEST_EXPONENT)
    scaled: Tensor = weights_BY * (-exponents).exp2()[:, None].to(value_BY)
    return scaled


def _rounding(dtypes: Collection[torch.dtype]) -> float:
    """Return what part of all parameters' gradient the rounding of one may be."""
    coarsest = max(torch.finfo(dtype).eps for dtype in dtypes)
    # A tensor core's or a bfloat16 unit's sums are wider than its results.
    return (4 if coarsest > 1e-4 else 64) * coarsest


def _row_norm(term: Term, weights_BY: Tensor) -> float:
    """Return the norm of one row in the sum, whose rounding is left where the sum cancels."""
    middle = term.samples // 2
    row = term.narrow(slice(middle, middle + 1), slice(0, 1)).squared_norm()
    return float(row.sqrt()) * abs(float(weights_BY[middle, 0]))


def _norm(x: Tensor) -> float:
    """Return ‖x‖; where float32 loses it to overflow or underflow, from float64."""
    x = wide(x.to_dense().detach()).reshape(-1)
    # BLAS reads memory once, at several times the speed of `vector_norm`, but counts in 32 bits.
    norm = sqrt(torch.dot(x, x)) if x.numel() < 2**31 else float(torch.linalg.vector_norm(x))
    if _SMALLEST < norm < 1 / _SMALLEST or x.device.type == "mps":
        return norm
    return float(torch.linalg.vector_norm(x.double()))


def _total(norms: Iterable[float]) -> float:
    return hypot(*(norm for norm in norms if isfinite(norm)))
