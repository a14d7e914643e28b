"""The probe runs behind a plan: find the samples among the inputs, run thrice, compare.

Which dim of an input counts samples is not known beforehand: a guess is tried on `SAMPLES` and on
`SAMPLES + EXTRA` samples and holds if z then has as many rows. Cost: three forward passes of
`SAMPLES + EXTRA` samples at most, with their graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor

from gradbox_engine.errors import CoupledSamples, NoBatchAxis
from gradbox_engine.model.kernels import checkpoints_inlined
from gradbox_engine.per_sample.planning.axis_search import EXTRA, find, samples_that_differ
from gradbox_engine.per_sample.planning.model import CallableModel, copied
from gradbox_engine.per_sample.planning.plan import Plan, ProbeUses, make_plan
from gradbox_engine.per_sample.recording.batch_axis import BatchAxis
from gradbox_engine.per_sample.recording.function_calls import Use, UseLog
from gradbox_engine.per_sample.recording.index_selections import Selection, may_reorder

SAMPLES = 4
CHANGED = 2

Axes = Mapping[str, int]
T = TypeVar("T")


CALL_ERRORS = (
    RuntimeError,
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    AssertionError,
    ArithmeticError,
)
"""What a model may raise where a guess at its inputs' dim of samples is wrong."""


@dataclass(frozen=True)
class ProbeRun:
    """What one probe run showed."""

    uses: list[Use]
    selections: list[Selection]
    z: Tensor


def plan_for(
    model: CallableModel, shard: Mapping[str, Any], index: int, *, samples: int = SAMPLES
) -> Plan:
    """Run the probes and return the plan.

    Raises:
        NoBatchAxis: no dim of the inputs gives z one row a sample.
        CoupledSamples: one sample's output changes when another sample does.
    """
    axes, first, second = _sized_runs(model, shard, index, samples)
    more = resized(shard, axes, samples + EXTRA)
    third = _on_replaced(more, axes, lambda few: _probe(model, few, index))
    uses = ProbeUses(first.uses, second.uses, third.uses, samples, CHANGED)
    if "coupling" not in model.unchecked and _others_differ(second.z, third.z, BatchAxis(0)):
        _refuse_coupling(uses)
    plan = make_plan(uses, model.parameters)
    plan.reorders = may_reorder(first.selections, second.selections)
    plan.axes = dict(axes)
    model.restore_buffers()
    return plan


def couples(model: CallableModel, shard: Mapping[str, Any], axes: Axes, index: int) -> bool:
    """Replace one of a few samples of a shard, and say whether the output of another changed.

    Cost: two forward passes of `SAMPLES` samples.
    """

    def z(few: dict[str, Any]) -> Tensor:
        return _z(model, few, index)

    few = resized(shard, axes, SAMPLES)
    found = _others_differ(z(few), _on_replaced(few, axes, z), BatchAxis(0))
    model.restore_buffers()
    return found


def _sized_runs(
    model: CallableModel, shard: Mapping[str, Any], index: int, samples: int
) -> tuple[Axes, ProbeRun, ProbeRun]:
    failure: Exception | None = None
    for axes in _guesses(shard):
        try:
            first = _probe(model, resized(shard, axes, samples), index)
            if first.z.shape[0] != samples:
                continue
            second = _probe(model, resized(shard, axes, samples + EXTRA), index)
        except CALL_ERRORS as error:
            failure = failure or error
            continue
        if second.z.shape[0] == samples + EXTRA:
            return axes, first, second
    if failure is not None:
        raise failure
    shapes = {name: tuple(x.shape) for name, x in shard.items() if isinstance(x, Tensor)}
    raise NoBatchAxis(
        f"no dim of the inputs {shapes} could be cut to {samples} samples so that the output has "
        f"{samples} rows: put the samples on dim 0 of the output, and on one dim of the inputs"
    )


def _guesses(shard: Mapping[str, Any]) -> Iterator[Axes]:
    """Yield guesses at which dim of each input counts samples; dim 0 of the longest run first."""
    tensors = {name: x for name, x in shard.items() if isinstance(x, Tensor) and x.dim()}
    for dim in (0, 1):
        sizes = [x.shape[dim] for x in tensors.values() if x.dim() > dim]
        for size in sorted(set(sizes), key=lambda size: (-sizes.count(size), -size)):
            if size > 1 or set(sizes) == {1}:
                yield {n: dim for n, x in tensors.items() if x.dim() > dim and x.shape[dim] == size}
        if 1 in sizes and set(sizes) != {1}:
            yield {n: dim for n, x in tensors.items() if x.dim() > dim and x.shape[dim] == 1}


def resized(shard: Mapping[str, Any], axes: Axes, samples: int) -> dict[str, Any]:
    """Return the shard with `samples` of its samples, repeated where it has fewer."""
    sized = dict(shard)
    for name, dim in axes.items():
        index = torch.arange(samples, device=shard[name].device) % shard[name].shape[dim]
        sized[name] = shard[name].index_select(dim, index)
    return sized


def _on_replaced(shard: dict[str, Any], axes: Axes, run: Callable[[dict[str, Any]], T]) -> T:
    """Run on a shard in which sample `CHANGED` is replaced."""
    try:
        return run(_replaced(shard, axes))
    except CALL_ERRORS:
        # A column of floats may hold categories, of which noise makes unknown ones.
        return run(_replaced(shard, axes, noise=False))


def _replaced(shard: dict[str, Any], axes: Axes, *, noise: bool = True) -> dict[str, Any]:
    """Replace sample `CHANGED`: noise on floats if `noise`, another sample's numbers elsewhere."""
    replaced = dict(shard)
    for name, dim in axes.items():
        x = shard[name].movedim(dim, 0).clone()
        mine = x[CHANGED]
        if x.is_floating_point() and noise:
            generator = torch.Generator().manual_seed(0)
            drawn = torch.randn(mine.shape, generator=generator, dtype=torch.float64)
            scale = mine.std(unbiased=False).clamp_min(0.1) if mine.numel() > 1 else 0.1
            x[CHANGED] = mine + drawn.to(mine) * scale
        else:
            others = [row for row in x if not torch.equal(row, mine)]
            x[CHANGED] = others[0] if others else mine.flip(-1) if mine.dim() else mine
        replaced[name] = x.movedim(0, dim)
    return replaced


def _probe(model: CallableModel, shard: Mapping[str, Any], index: int) -> ProbeRun:
    log = UseLog(model.model, model.parameters)
    try:
        z = _z(model, shard, index, log)
    finally:
        log.remove_hooks()
    return ProbeRun(log.uses, log.selections, z)


def _z(
    model: CallableModel,
    shard: Mapping[str, Any],
    index: int,
    log: AbstractContextManager[Any] | None = None,
) -> Tensor:
    model.restore_buffers()
    arguments = copied(shard)
    with (
        model.stream(index),
        torch.enable_grad(),
        checkpoints_inlined(),
        log or nullcontext(),
    ):
        return model.call(arguments).detach()


def _refuse_coupling(uses: ProbeUses) -> NoReturn:
    where = (_first_coupling(uses) if uses.alike else None) or "the model"
    raise CoupledSamples(
        f"replacing one sample changed the output of others; first seen in {where}: a sample then "
        "has no gradient of its own. Batch norm in train mode does this: use mode='eval', or "
        "replace it by group norm. unchecked=('coupling',) turns this check off"
    )


def _others_differ(second: Tensor, third: Tensor, axis: BatchAxis) -> bool:
    differs = samples_that_differ(second, third, axis)
    differs[CHANGED] = False
    return bool(differs.any())


def _first_coupling(uses: ProbeUses) -> str | None:
    """Name the first module in which other samples than the replaced one differ, if any."""
    for one, two, three in zip(uses.first, uses.second, uses.third, strict=True):
        function = getattr(one.function, "__name__", str(one.function))
        for inputs, place in ((True, "what enters"), (False, "")):
            groups = zip(
                *((run.inputs if inputs else run.outputs) for run in (one, two, three)), strict=True
            )
            for a, b, c in groups:
                axis = find(a, b, c, uses.samples, uses.changed)
                if axis is not None and _others_differ(b.detach(), c.detach(), axis):
                    return f"{place} {one.module or 'the model'!r} ({function})".strip()
    return None
