"""The trial runs behind a plan: find the samples among the inputs, run thrice, compare.

Which dim of an input counts samples is not known beforehand: a guess is tried on `SAMPLES` and on
`SAMPLES + EXTRA` samples and holds if z then has as many rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor

from gradbox_engine.model.reentrant import plain_checkpoints
from gradbox_engine.model.shard_rng import generator_fingerprint
from gradbox_engine.per_sample.errors import CoupledSamples, NoBatchAxis
from gradbox_engine.per_sample.planning.batch_axis import (
    EXTRA,
    BatchAxis,
    find,
    samples_that_differ,
)
from gradbox_engine.per_sample.planning.plan import Plan, Trials, make_plan
from gradbox_engine.per_sample.planning.reordering import Selection, may_reorder
from gradbox_engine.per_sample.planning.watched_model import CALL_ERRORS, WatchedModel, fresh
from gradbox_engine.per_sample.recording.function_calls import Scan, Sighting

SAMPLES = 4
CHANGED = 2

Axes = Mapping[str, int]


@dataclass(frozen=True)
class Scanned:
    """What one trial run showed."""

    sightings: list[Sighting]
    selections: list[Selection]
    z: Tensor
    random: bool  # whether it drew from a global generator


def plan_for(
    model: WatchedModel, shard: Mapping[str, Any], index: int, *, samples: int = SAMPLES
) -> Plan:
    """Run the trials and return the plan.

    Raises:
        NoBatchAxis: no dim of the inputs gives z one row a sample.
        CoupledSamples: one sample's output changes when another sample does.
    """
    before = _buffer_states(model)
    axes, first, second = _sized_runs(model, shard, index, samples)
    third = _replaced_run(model, resized(shard, axes, samples + EXTRA), axes, index)
    stateful = before != _buffer_states(model)
    trials = Trials(first.sightings, second.sightings, third.sightings, samples, CHANGED)
    moved = samples_that_differ(second.z, third.z, BatchAxis(0))
    told = bool(moved[CHANGED])
    moved[CHANGED] = False
    if "coupling" not in model.unchecked and moved.any():
        _refuse_coupling(trials)
    separate = told or (trials.alike and _first_coupling(trials) is None)
    plan = make_plan(trials, model.parameters)
    plan.separate = separate
    plan.reorders = may_reorder(first.selections, second.selections)
    plan.axes = dict(axes)
    plan.random = first.random
    plan.stateful = stateful
    return plan


def _buffer_states(model: WatchedModel) -> dict[str, tuple[int, int]]:
    """Return what changes when a buffer is written to, bound anew, or registered."""
    return {
        name: (id(buffer), buffer._version)
        for name, buffer in model.model.named_buffers(remove_duplicate=False)
    }


def _sized_runs(
    model: WatchedModel, shard: Mapping[str, Any], index: int, samples: int
) -> tuple[Axes, Scanned, Scanned]:
    failure: Exception | None = None
    for axes in _guesses(shard):
        try:
            first = _scan(model, resized(shard, axes, samples), index)
            if first.z.shape[0] != samples:
                continue
            second = _scan(model, resized(shard, axes, samples + EXTRA), index)
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


def _replaced_run(model: WatchedModel, shard: dict[str, Any], axes: Axes, index: int) -> Scanned:
    """Run on a shard in which sample `CHANGED` is replaced."""
    try:
        return _scan(model, _replaced(shard, axes), index)
    except CALL_ERRORS:
        # A column of floats may hold categories, which noise makes others than there are.
        return _scan(model, _replaced(shard, axes, noise=False), index)


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


def _scan(model: WatchedModel, shard: Mapping[str, Any], index: int) -> Scanned:
    model.restore_buffers()
    arguments = fresh(shard)
    scan = Scan(model.model, model.parameters)
    try:
        with model.stream(index), torch.enable_grad(), plain_checkpoints():
            before = generator_fingerprint()
            with scan:
                z = model.call(arguments)
            random = generator_fingerprint() != before
    finally:
        scan.close()
    return Scanned(scan.sightings, scan.selections, z.detach(), random)


def _refuse_coupling(trials: Trials) -> NoReturn:
    where = (_first_coupling(trials) if trials.alike else None) or "the model"
    raise CoupledSamples(
        f"replacing one sample changed the output of others; first seen in {where}: a sample then "
        "has no gradient of its own. Batch norm in train mode does this: use mode='eval', or "
        "replace it by group norm. unchecked=('coupling',) turns this check off"
    )


def _others_differ(second: Tensor, third: Tensor, axis: BatchAxis) -> bool:
    differs = samples_that_differ(second, third, axis)
    differs[CHANGED] = False
    return bool(differs.any())


def _first_coupling(trials: Trials) -> str | None:
    """Name the first module in which other samples than the replaced one differ, if any."""
    for one, two, three in zip(trials.first, trials.second, trials.third, strict=True):
        function = getattr(one.function, "__name__", str(one.function))
        for inputs, place in ((True, "what enters"), (False, "")):
            groups = zip(
                *((run.inputs if inputs else run.outputs) for run in (one, two, three)), strict=True
            )
            for a, b, c in groups:
                axis = find(a, b, c, trials.samples, trials.changed)
                if axis is not None and _others_differ(b.detach(), c.detach(), axis):
                    return f"{place} {one.module or 'the model'!r} ({function})".strip()
    return None
