"""The rows of a plan are compared with autograd's gradient on the same graph.

Two comparisons, for each parameter: the rows, weighted at random, sum to the gradient of the
weighted sum, and one sample's row is the gradient of that sample's number alone. The weights differ
from sample to sample, so rows in another order do not pass. Both use the graph of the very forward
that the rules read, so ReLU kinks and dropout masks are the same and only rounding may differ. A
parameter that fails takes the loop road from then on and is named there; so a use that escaped the
watch (a compiled or custom function) costs time and not correctness.

A gradient of zero compares nothing. The parameter stays unverified, and the comparison is made
again on the first shard that reaches it.

Cost: one forward, one summed backward, one backward for the sample, and the factors of one output.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from gradbox_engine.per_sample.backward import Traced
from gradbox_engine.per_sample.errors import CoupledSamples, SelfCheckFailed
from gradbox_engine.per_sample.planning.batch_axis import BatchAxis, samples_that_differ
from gradbox_engine.per_sample.planning.plan import Plan

TOLERANCE = {torch.float64: 1e-8, torch.float32: 2e-3, torch.bfloat16: 1e-1, torch.float16: 3e-2}
"""‖difference‖ over ‖gradient‖ of a parameter: wide, for sums over samples may cancel."""


def check_head(z: Tensor, value: Tensor, head: Callable[[Tensor], Tensor]) -> bool:
    """Replace one row of z and look whether the loss of another sample moves.

    Args:
        value: what `head` gives for z.

    Returns:
        Whether this said something: the sample's own loss moved. A flat loss hides what it reads.

    Raises:
        CoupledSamples: another's moved.
    """
    if z.shape[0] < 2:
        return False
    sample = z.shape[0] // 2
    moved = z.clone()
    moved[sample] = z[sample - 1] + 0.1
    with torch.no_grad():
        apart = samples_that_differ(value, head(moved), BatchAxis(0))
    told = bool(apart[sample])
    apart[sample] = False
    if apart.any():
        raise CoupledSamples(
            "the loss of one sample changed when another sample's output did, so it has no "
            "gradient per sample: entry b of the loss may read row b of z alone"
        )
    return told


def mixed(head: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Return a head of one output: a random combination of all outputs of `head`."""

    def combined(z: Tensor) -> Tensor:
        value = head(z)
        if value.shape[1] == 1:
            return value
        return value @ _random(value.shape[1], value)[:, None]

    return combined


def reaches(traced: Traced, names: Sequence[str]) -> bool:
    """Say whether any of these parameters has a gradient here that is not zero.

    Cost: a backward pass as far as the graph leads to these parameters; none where it does not.
    """
    wanted = [traced.session.parameters[name] for name in names]
    weights = _random(traced.value.numel(), traced.value).view_as(traced.value)
    total = (traced.value * weights).sum()
    found = torch.autograd.grad(total, wanted, retain_graph=True, allow_unused=True)
    return any(_tells(gradient) for gradient in found)


def check_rows(traced: Traced, plan: Plan) -> bool:
    """Send parameters whose rows are not autograd's down the loop road; say if any was.

    Args:
        traced: with one output, see `mixed`. Its graph is given up.

    Raises:
        SelfCheckFailed: one that is there already differs.
    """
    names = list(traced.session.parameters)
    wanted = [traced.session.parameters[name] for name in names]
    sample, column = traced.samples // 2, traced.value[:, 0]
    weights_B = _random(traced.samples, column)
    total = torch.autograd.grad(
        (column * weights_B).sum(), wanted, retain_graph=True, allow_unused=True
    )
    alone = torch.autograd.grad(column[sample], wanted, retain_graph=True, allow_unused=True)
    terms = traced.terms(last=True)
    # A gradient that is zero but for rounding (a key's bias before softmax) has no own scale.
    rounding = _rounding(traced) * float(_norm(total))
    failed = []
    for name, summed, row in zip(names, total, alone, strict=True):
        term = terms[name]
        mine = term.narrow(slice(sample, sample + 1), slice(None)).block()[0, 0]
        near = max(TOLERANCE[term.dtype], TOLERANCE[traced.session.rounding])
        found = term.vjp(weights_B[:, None].to(term.dtype))
        # Rows of the loop road are autograd's own; their sum differs from autograd's by roundings.
        whole = name in plan.loops or _same(found, summed, mine, near, rounding)
        if not (whole and _same(mine, row, mine, near, rounding)):
            failed.append(name)
        elif _tells(summed):
            plan.verified.add(name)
    _send_to_loops(failed, plan)
    return bool(failed)


def _tells(gradient: Tensor | None) -> bool:
    """Say whether a gradient can confirm anything: there, not zero, and finite."""
    if gradient is None:
        return False
    found = gradient.to_dense()
    return bool(found.any()) and bool(found.isfinite().all())


def _send_to_loops(failed: Sequence[str], plan: Plan) -> None:
    stuck = [name for name in failed if name in plan.loops]
    if stuck:
        raise SelfCheckFailed(
            f"the per-sample gradients of {stuck} do not sum to the gradient that autograd gives: "
            "please report this model; unchecked=('self',) turns the check off"
        )
    plan.loop(failed, "its rule's result differed from autograd's")


def _random(size: int, like: Tensor) -> Tensor:
    """Return numbers of size 1/2 to 3/2 and either sign, which 16-bit dtypes hold exactly."""
    generator = torch.Generator().manual_seed(size)
    drawn = torch.randint(-32, 32, (size,), generator=generator)
    return ((drawn + torch.where(drawn < 0, -16, 17)) / 32).to(like)


def _rounding(traced: Traced) -> float:
    """Return what part of all parameters' gradient the rounding of one may be."""
    used = {p.dtype for p in traced.session.parameters.values()} | {traced.session.rounding}
    coarsest = max(torch.finfo(dtype).eps for dtype in used)
    # A tensor core's or a bfloat16 unit's sums are wider than its results.
    return (4 if coarsest > 1e-4 else 64) * coarsest


def _same(
    found: Tensor, expected: Tensor | None, row: Tensor, near: float, rounding: float
) -> bool:
    wide = _wide(found)
    found = found.detach().to(wide)
    reference = torch.zeros_like(found) if expected is None else expected.detach().to(wide)
    scale = reference.square().sum().sqrt() + row.to(wide).square().sum().sqrt()
    apart = (found - reference).square().sum().sqrt()
    close = bool(apart <= near * scale + rounding)
    return close or not bool(reference.isfinite().all())  # what overflows is not compared


def _norm(gradients: Sequence[Tensor | None]) -> Tensor:
    present = [gradient for gradient in gradients if gradient is not None]
    squares = torch.stack([g.detach().to(_wide(g)).square().sum() for g in present])
    return squares.nan_to_num(0.0, 0.0).sum().sqrt()  # what overflowed has no size to compare with


def _wide(x: Tensor) -> torch.dtype:
    return torch.float32 if x.device.type == "mps" else torch.float64
