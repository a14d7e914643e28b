"""Rows are compared with autograd's gradient, all of a shard's or one sample's.

All rows, with weights w_by of either sign, drawn from the job's seed:

    Σ_by w_by r_by  =  ∂(Σ_by w_by v_by)/∂θ,     r the rows, v the losses or the entries of z

for each parameter. The left side is linear in the rows and the weights differ from sample to
sample, so one wrong row, rows in another order, a use of a parameter that was not recorded, and one
sample's dependence on another all change it. Samples count alike: their weights are divided by the
norm of ∂v_b/∂z_b. Both sides come from one forward pass, so ReLU kinks and dropout masks are the
same and only rounding may differ.

The rows come from a backward pass without weights. Where ℓ_c depends on features h_b of another
sample, row b holds Σ_c ∂ℓ_c/∂h_b, all of it weighted with w_b, and autograd's gradient weights each
∂ℓ_c/∂h_b with w_c: they differ unless it is zero. A dependence without a derivative is not seen.

One row: that of a sample drawn from the job's seed, against autograd's gradient at a cotangent of
that sample's z alone, in the shard's graph or in that of a call on the sample alone.

A gradient of zero confirms nothing, nor does one that overflows; no sample is drawn whose ∂v_b/∂z_b
is zero or not finite.

Cost: one backward pass, and the rows' weighted sum from the factors; of one row, its share of that.

Shapes: B samples, Y outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from math import hypot, inf, isfinite
from typing import NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor

from gradbox_engine.errors import BadSampleLoss, CoupledSamples, ModelCallFailed
from gradbox_engine.model.calling.shard_rng import stream_seed
from gradbox_engine.per_sample.gradients import gradients
from gradbox_engine.per_sample.recording.batch_axis import BatchAxis, samples_that_differ
from gradbox_factors import Term, squared_norms
from gradbox_factors.slabs import cached_bytes, slabs
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


@dataclass(frozen=True)
class Comparison:
    """The parameters whose rows are not autograd's, and those whose rows were confirmed."""

    wrong: frozenset[str]
    confirmed: frozenset[str]


@dataclass(frozen=True)
class DrawnRow:
    """The sample whose row is compared, and the cotangent of its z that the row belongs to."""

    sample: int
    weights: Tensor  # (1, Y)
    cotangent: Tensor  # (1, ...), of the shape of the sample's z


@torch.no_grad()
def check_head(z: Tensor, value: Tensor, head: Callable[..., Tensor]) -> None:
    """See that no sample's loss depends on another row of z.

    A sample's loss alone is what it was in the batch. Where it is not, as of a loss that counts its
    samples, one row of z is replaced, and no other sample's loss may change.

    Args:
        value: what `head` gives for z.

    Raises:
        CoupledSamples: another's changed.
    """
    if z.shape[0] < 2:
        return
    sample = z.shape[0] // 2
    if _same_loss_alone(z, value, head, sample):
        return
    replaced = z.clone()
    replaced[sample] = z[sample - 1] + 0.1
    differ = samples_that_differ(value, head(replaced), BatchAxis(0))
    differ[sample] = False
    if differ.any():
        _refuse_loss()


def _same_loss_alone(z: Tensor, value_B1: Tensor, head: Callable[..., Tensor], sample: int) -> bool:
    of_batch = value_B1[sample]
    if not (isfinite(number := float(of_batch)) and number):  # a masked sample's tells nothing
        return False
    try:
        alone = head(z[sample : sample + 1].clone(), first=sample)
    except (ModelCallFailed, BadSampleLoss):  # it is made for so many samples
        return False
    if torch.equal(alone[0], of_batch):
        return True
    replaced = value_B1.clone()
    replaced[sample] = alone[0]
    return not samples_that_differ(value_B1, replaced, BatchAxis(0))[sample]


def loss_slopes(z: Tensor, value_B1: Tensor) -> Tensor | None:
    """Return ∂ℓ_b/∂z_b of every sample, None where no path leads to z; keeps the graph."""
    (slopes,) = gradients(value_B1, [z], torch.ones_like(value_B1), keep_graph=True)
    return slopes


def check_slopes(z: Tensor, value_B1: Tensor, slopes: Tensor, *, seed: int) -> None:
    """Weight the losses, and see that the slopes are those of each sample's own loss.

    Weights are powers of two, from 1 on, so that neither rounding nor underflow depends on them.

    Raises:
        CoupledSamples: a loss depends on another row of z.
    """
    weights_B1 = (_drawn(value_B1, seed) + _SIZES // 2).to(value_B1).exp2()
    weighted = loss_slopes(z, value_B1 * weights_B1)
    if weighted is None:
        return
    near = 1e3 * torch.finfo(slopes.dtype).eps
    for start, stop in slabs(len(z), slopes.nbytes, cached_bytes(z.device)):
        found, own = (x[start:stop].reshape(stop - start, -1) for x in (weighted, slopes))
        apart = torch.addcmul(found, own, weights_B1[start:stop], value=-1).norm(dim=1)
        if not apart.any():  # as of nearly every loss: products with powers of two are exact
            continue
        sizes = found.norm(dim=1), own.norm(dim=1) * weights_B1[start:stop, 0]
        largest = torch.maximum(*sizes)
        if ((apart > near * largest) & largest.isfinite()).any():
            _refuse_loss()


def reference(
    slopes: Tensor | None,
    value_BY: Tensor,
    gradient_at: Callable[[Tensor], Mapping[str, Tensor | None]],
    *,
    seed: int,
) -> Reference:
    """Return autograd's gradient of the weighted sum.

    Args:
        slopes: ∂v_b/∂z_b; None where the rows are of z's entries.
        value_BY: what the rows are of.
        gradient_at: gives it for weights (B, Y).
    """
    weights_BY = _weights(value_BY, seed)
    if slopes is not None:
        weights_BY = _over_slopes(weights_BY, slopes)
    return Reference(weights_BY, gradient_at(weights_BY))


def draw_row(z: Tensor, slopes: Tensor | None, outputs: range, *, seed: int) -> DrawnRow | None:
    """Draw a sample, with weights for its outputs; None where all slopes are zero or not finite.

    Args:
        slopes: ∂v_b/∂z_b; None where the rows are of z's entries.
    """
    drawn = stream_seed(seed, 0, 0)
    sizes = (1, *z.shape[1:])
    if slopes is None:
        weights = torch.linspace(0.5, 1.5, len(outputs), dtype=z.dtype, device=z.device)[None]
        left_out = z.shape[1:].numel() - outputs.stop
        if outputs.start or left_out:
            padded = F.pad(weights, (outputs.start, left_out))
            return DrawnRow(drawn % len(z), weights, padded.view(sizes))
        return DrawnRow(drawn % len(z), weights, weights.view(sizes))
    flat = slopes.reshape(len(z), -1)
    norms = flat.norm(dim=1)
    drawable = (norms > 0) & norms.isfinite()
    if not drawable.all():  # or squares under- or overflow
        drawable = flat.any(1) & flat.isfinite().all(1)
    candidates = drawable.nonzero()[:, 0].tolist()
    if not candidates:
        return None
    sample = candidates[drawn % len(candidates)]
    return DrawnRow(sample, slopes.new_ones(1, 1), slopes.narrow(0, sample, 1))


@torch.no_grad()
def output_change(z_1: Tensor, z: Tensor, sample: int, *, rounding: torch.dtype) -> float:
    """Return how far z of a sample called alone is from that of the batch: 0 if by rounding.

    Rounding is relative to the sample's z or, where that is small by chance, to what is usual in
    the batch; entries that are equal, as those of masked logits, are no scale for the others.

    Args:
        z_1: of the call, (1, ...).
        z: of the batch.

    Returns:
        ‖z_1 − z_b‖ / ‖z_b‖ over the entries that differ.
    """
    expected = z.detach()[sample : sample + 1]
    same = z_1 == expected
    difference = _norm(z_1 - expected)
    if not isfinite(difference):
        same |= z_1.isnan() & expected.isnan()
        difference = _norm((z_1 - expected).masked_fill(same, 0.0))
    if difference == 0:
        return 0.0
    size = _norm_of_finite(expected, same)
    near = max(TOLERANCE[z.dtype], TOLERANCE[rounding])
    if difference <= near * size:
        return 0.0
    usual = torch.maximum(expected.abs(), z.detach().abs().nanmedian(0, keepdim=True).values)
    if difference <= near * _norm_of_finite(usual, same):
        return 0.0
    return difference / size if size else inf


@torch.no_grad()
def compare(expected: Reference, terms: Mapping[str, Term], *, rounding: torch.dtype) -> Comparison:
    """Compare terms with autograd's gradient.

    Args:
        rounding: the narrowest dtype in which the model multiplies.
    """
    sizes, doubtful, confirmed = {}, {}, set()
    for name, gradient in expected.gradients.items():  # each once, while it is in the cache
        sizes[name] = size = 0.0 if gradient is None else _norm(gradient)
        if not isfinite(size):
            continue
        term = terms[name].widened()  # float16 holds no weight beyond 65504
        found = term.vjp(expected.weights.to(term.dtype))
        found = found if gradient is None else found.sub_(gradient.to(found.device))
        difference = _norm(found, beside=size)
        if not difference <= _tolerance(terms[name], rounding) * size:  # NaN is doubtful as well
            doubtful[name] = difference
        elif size > 0 or gradient is None:
            confirmed.add(name)
    if not doubtful:
        return Comparison(frozenset(), frozenset(confirmed))
    # A gradient that is zero but for rounding (a key's bias before softmax) has no own scale.
    dtypes = {terms[name].dtype for name in sizes}
    least = _rounding(dtypes | {rounding}) * _total(sizes.values())
    wrong = set()
    for name, difference in doubtful.items():
        size, term = sizes[name], terms[name]
        near = _tolerance(term, rounding)
        if not (
            difference <= near * size + least
            or difference <= near * (size + _row_norm(term, expected.weights)) + least
        ):
            wrong.add(name)
        elif size > 0 or expected.gradients[name] is None:
            confirmed.add(name)
    return Comparison(frozenset(wrong), frozenset(confirmed))


def _norm_of_finite(x: Tensor, left_out: Tensor) -> float:
    return _norm(x.masked_fill(left_out | ~x.isfinite(), 0.0))


def _tolerance(term: Term, rounding: torch.dtype) -> float:
    return max(TOLERANCE[term.dtype], TOLERANCE[rounding])


def _drawn(value_BY: Tensor, seed: int) -> Tensor:
    """Return whole numbers from -32 to 31, (B, Y).

    Of one output, those of the first 64 samples all differ, as do those of the next 64.
    """
    generator = torch.Generator().manual_seed(seed % 2**63)
    samples, outputs = value_BY.shape
    blocks = -(-samples // _SIZES)
    order = torch.randperm(_SIZES, generator=generator)[:, None]
    shifts = torch.randint(_SIZES, (blocks, 1, outputs), generator=generator)
    return ((order + shifts) % _SIZES).flatten(0, 1)[:samples] - _SIZES // 2


def _weights(value_BY: Tensor, seed: int) -> Tensor:
    """Return numbers of size 1/2 to 3/2 and either sign, which 16-bit dtypes hold exactly."""
    drawn = _drawn(value_BY, seed)
    weights_BY: Tensor = ((drawn + torch.where(drawn < 0, -16, 17)) / 32).to(value_BY)
    return weights_BY


def _over_slopes(weights_BY: Tensor, slopes: Tensor) -> Tensor:
    """Divide by each sample's norm of ∂v/∂z, rounded to a power of two."""
    exponents = slopes.reshape(slopes.shape[0], -1).norm(dim=1).log2().round()
    exponents = exponents.nan_to_num(0.0, 0.0, 0.0).clamp(-_LARGEST_EXPONENT, _LARGEST_EXPONENT)
    scaled: Tensor = weights_BY * (-exponents).exp2()[:, None].to(weights_BY)
    return scaled


def _refuse_loss() -> NoReturn:
    raise CoupledSamples(
        "the loss of one sample depends on another sample's output, so it has no gradient per "
        "sample: entry b of the loss may read row b of z alone"
    )


def _rounding(dtypes: Collection[torch.dtype]) -> float:
    """Return what part of all parameters' gradient the rounding of one may be."""
    coarsest = max(torch.finfo(dtype).eps for dtype in dtypes)
    # A tensor core's or a bfloat16 unit's sums are wider than its results.
    return (4 if coarsest > 1e-4 else 64) * coarsest


def _row_norm(term: Term, weights_BY: Tensor) -> float:
    """Return the norm of one row in the sum, whose rounding is left where the sum cancels."""
    middle = term.samples // 2
    row = term.narrow(slice(middle, middle + 1), slice(0, 1))
    return float(squared_norms({"": row})[""].sqrt()) * abs(float(weights_BY[middle, 0]))


def _norm(x: Tensor, *, beside: float = 0.0) -> float:
    """Return ‖x‖; where float32 loses it to overflow or underflow, in float64.

    Args:
        beside: what it is compared with, next to which an underflow may not matter.
    """
    x = wide(x if x.layout is torch.strided else x.to_dense())
    norm = float(torch.linalg.vector_norm(x))
    if (max(norm, beside) > _SMALLEST and norm < 1 / _SMALLEST) or x.device.type == "mps":
        return norm
    return float(torch.linalg.vector_norm(x, dtype=torch.float64))


def _total(norms: Iterable[float]) -> float:
    return hypot(*(norm for norm in norms if isfinite(norm)))
