"""The first use of a plan is compared with autograd on the same graph.

Two comparisons, for each parameter: the per-sample gradients sum to the gradient of the sum, and
one sample's row is the gradient of that sample's number alone. Both use the graph of the very
forward that the rules read, so ReLU kinks and dropout masks are the same and only rounding may
differ. A parameter that fails takes the loop road from then on and is named there; so a use that
escaped the watch (a compiled or custom function) costs time and not correctness.

Cost: one summed backward, one backward for the sample, and the dense rows of one output.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from gradbox_engine.per_sample.batch_axis import BatchAxis, samples_that_differ
from gradbox_engine.per_sample.factoring import Traced
from gradbox_engine.per_sample.failures import CoupledSamples, SelfCheckFailed
from gradbox_engine.per_sample.plan import Plan

TOLERANCE = {torch.float64: 1e-8, torch.float32: 2e-3, torch.bfloat16: 1e-1, torch.float16: 3e-2}
"""‖difference‖ over ‖gradient‖ of a parameter: wide, for sums over samples may cancel."""


def check_head(z: Tensor, head: Callable[[Tensor], Tensor]) -> None:
    """Replace one row of z and look whether the loss of another sample moves.

    Raises:
        CoupledSamples: it does.
    """
    if z.shape[0] < 2:
        return
    sample = z.shape[0] // 2
    moved = z.clone()
    moved[sample] = z[sample - 1] + 0.1
    with torch.no_grad():
        apart = samples_that_differ(head(z), head(moved), BatchAxis(0))
    apart[sample] = False
    if apart.any():
        raise CoupledSamples(
            "the loss of one sample changed when another sample's output did, so it has no "
            "gradient per sample: entry b of the loss may read row b of z alone"
        )


def check_first_use(traced: Traced, plan: Plan) -> bool:
    """Send parameters whose result is not autograd's down the loop road; say if any was.

    Raises:
        SelfCheckFailed: one that is there already differs.
    """
    names = list(traced.session.parameters)
    wanted = [traced.session.parameters[name] for name in names]
    sample = traced.samples // 2
    column = traced.value[:, 0]
    total = torch.autograd.grad(column.sum(), wanted, retain_graph=True, allow_unused=True)
    alone = torch.autograd.grad(column[sample], wanted, retain_graph=True, allow_unused=True)
    terms = traced.terms(range(1), last=True)
    # A gradient that is zero but for rounding (a key's bias before softmax) has no own scale.
    rounding = 64 * torch.finfo(column.dtype).eps * float(_norm(total))
    failed = []
    for name, parameter, summed, row in zip(names, wanted, total, alone, strict=True):
        term = terms[name]
        ones = torch.ones(traced.samples, 1, dtype=term.dtype, device=parameter.device)
        mine = term.narrow(slice(sample, sample + 1), slice(None)).block()[0, 0]
        near = max(TOLERANCE[term.dtype], TOLERANCE[traced.session.rounding])
        whole = _same(term.vjp(ones), summed, mine, near, rounding)
        if not (whole and _same(mine, row, mine, near, rounding)):
            failed.append(name)
    stuck = [name for name in failed if name in plan.loops]
    if stuck:
        raise SelfCheckFailed(
            f"the per-sample gradients of {stuck} do not sum to the gradient that autograd gives: "
            "please report this model; unchecked=('self',) turns the check off"
        )
    plan.loop(failed, "its rule's result differed from autograd's on first use")
    return bool(failed)


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
