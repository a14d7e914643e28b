"""The probe runs behind a plan: find the samples among the inputs, run thrice, compare.

Which dim of an input counts samples is not known beforehand: a guess is tried on `SAMPLES` and on
`SAMPLES + EXTRA` samples and holds if z then has as many rows. Cost: three forward passes of
`SAMPLES + EXTRA` samples at most, with their graphs, and a fourth in 16 bits.

Where no guess holds and z of the shard as it is has one row, the shard is one sample: a graph, say,
whose nodes no model can be given in part. Its row is then that of one backward pass.

Samples meet where other samples than the replaced one differ. If that shows in z, they have no rows
of their own. If it does not, a layer may still mix them: what follows undoes it, or multiplies it
by zero. That is left to data, so the rows of every shard are compared.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, NoReturn

import torch
from torch import Tensor, nn

from gradbox_engine.errors import CoupledSamples, ModelCallFailed, NoBatchAxis
from gradbox_engine.model.calling.shard_feed import Position
from gradbox_engine.model.calling.shard_rng import generator_fingerprint
from gradbox_engine.model.precision import autocast
from gradbox_engine.model.tensor_equality import same_values
from gradbox_engine.per_sample.planning.model import CallableModel
from gradbox_engine.per_sample.planning.plan import Plan, make_plan
from gradbox_engine.per_sample.planning.probed_use import ProbeUses
from gradbox_engine.per_sample.recording.batch_axis import (
    CHANGED,
    EXTRA,
    BatchAxis,
    changed_dim,
    others_equal,
    samples_that_differ,
)
from gradbox_engine.per_sample.recording.function_calls import custom_functions_shown
from gradbox_engine.per_sample.recording.index_selections import Selection, may_reorder
from gradbox_engine.per_sample.recording.shared_numbers import SampleSizes, shares_numbers
from gradbox_engine.per_sample.recording.use_log import (
    Edge,
    Use,
    UseLog,
    edges_of,
    same_calls,
    unseen_uses,
)
from gradbox_engine.torch_private import of_a_transform

SAMPLES = 3

RECOMPUTED: Final = "its shard is recomputed in the backward pass"

BAGS: Final = (
    "The ids of an EmbeddingBag with offsets are no samples: give it ids of shape "
    "(samples, ids of each), filled up with its padding_idx, and no offsets"
)

Axes = Mapping[str, int]


@dataclass(frozen=True)
class ProbeRun:
    """What one probe run showed."""

    uses: list[Use]
    selections: list[Selection]
    sizes: list[SampleSizes]
    z: Tensor
    draws: bool  # whether it drew random numbers
    leaves: frozenset[Edge]  # of z


def plan_for(model: CallableModel, position: Position, *, samples: int = SAMPLES) -> Plan:
    """Run the probes on a shard and return the plan.

    Raises:
        NoBatchAxis: no dim of the inputs gives z one row a sample.
        CoupledSamples: one sample's output changes when another sample does.
    """
    shard, recomputed = model.shard(position), model.recomputes(position)
    if recomputed and _probe(model, shard, position).z.shape[0] == 1:  # for others would not fit
        return _plan_for_one_sample(model)
    sized = _sized_runs(model, shard, position, samples)
    if sized is None:
        return _plan_for_one_sample(model)
    axes, first, second = sized
    probed = resized(shard, axes, samples, EXTRA)
    third, other_inputs = _probe_replaced(model, probed, axes, position, expected=first.uses)
    rounding = _coarsest(first.uses, model.rounding)
    selects = may_reorder(first.selections, second.selections)
    uses = ProbeUses(first.uses, second.uses, third.uses, samples, selects)
    if "coupling" not in model.unchecked:
        coupled = others_differ(second.z, third.z, BatchAxis(0))
        if not coupled and rounding.itemsize == 2:  # so rough that the rows may not tell it
            moved = _probe(model, _others_moved(probed, axes), position)
            coupled = bool(samples_that_differ(second.z, moved.z, BatchAxis(0))[CHANGED])
        if coupled:
            refuse_coupling(uses)
    with autocast(model.options.precision, model.device):  # as the functions are called in
        plan = make_plan(uses, model.parameters)
    if recomputed:
        plan.loop_over_all(model.parameters, RECOMPUTED)
    plan.loop(model.hooked, "a hook changes its gradient")
    if plan.recorded:
        unseen = unseen_uses(first.uses, first.leaves, plan.derived, model.parameters)
        plan.loop(unseen, "it is used by what no function call shows")
        plan.shares_numbers = bool(unseen)  # which nobody has seen
    mixes = uses.alike and any(mixing_layers(uses))
    plan.shares_numbers |= shares_numbers(first.sizes, second.sizes)
    plan.kept = other_inputs
    plan.compares_always |= selects or mixes or not other_inputs
    plan.rounding = rounding
    exact = plan.rounding.itemsize > 2 and model.options.precision != "tf32"
    plan.alone = exact and not (first.draws or second.draws or third.draws)
    plan.axes = dict(axes)
    plan.zeros = model.zeros()
    return plan


def _plan_for_one_sample(model: CallableModel) -> Plan:
    plan = Plan(one_sample=True)
    plan.loop_over_all(model.parameters, "a shard is one sample")
    plan.zeros = model.zeros()
    return plan


def _sized_runs(
    model: CallableModel, shard: Mapping[str, Any], position: Position, samples: int
) -> tuple[Axes, ProbeRun, ProbeRun] | None:
    """Return the guess that holds, with its first two runs; None where the shard is one sample."""
    failure: BaseException | None = None
    ran = False
    for axes in _guesses(shard):
        try:
            runs = _two_runs(model, shard, axes, position, samples)
        except ModelCallFailed as error:
            failure = failure or error.__cause__
            continue
        if runs is not None:
            return axes, *runs
        ran = ran or failure is None
    shapes = {name: tuple(x.shape) for name, x in shard.items() if isinstance(x, Tensor)}
    sizes = [shape[0] for shape in shapes.values() if shape]
    if sizes.count(0) * 2 > len(sizes):
        raise NoBatchAxis(
            f"expected a shard with samples, got inputs of shapes {shapes}: leave shards without "
            f"samples out"
        )
    # What the shard as it is makes the model raise is the model's error, not that of a guess.
    if _probe(model, shard, position).z.shape[0] == 1:
        return None
    for axes in _guesses_but_one(shard):
        with suppress(ModelCallFailed):
            runs = _two_runs(model, shard, axes, position, samples)
            if runs is not None:
                return axes, *runs
    # Where the first guess ran, what a later one raised says nothing of the model.
    why = "" if failure is None or ran else f" ({type(failure).__name__}: {failure})"
    has_bags = any(isinstance(module, nn.EmbeddingBag) for module in model.model.modules())
    raise NoBatchAxis(
        f"no dim of the inputs {shapes} could be cut to {samples} samples so that the output has "
        f"{samples} rows{why}: put the samples on dim 0 of the output, and on one dim of the "
        f"inputs; or let each shard be one sample, with an output of one row"
        f"{f'. {BAGS}' if has_bags else ''}"
    )


def _two_runs(
    model: CallableModel, shard: Mapping[str, Any], axes: Axes, position: Position, samples: int
) -> tuple[ProbeRun, ProbeRun] | None:
    """Return a run on `samples` samples and one on more; None if z has other numbers of rows."""
    first = _probe(model, resized(shard, axes, samples), position, modules=True)
    if first.z.shape[0] != samples:
        return None
    second = _probe(model, resized(shard, axes, samples, EXTRA), position)
    return (first, second) if second.z.shape[0] == samples + EXTRA else None


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


def _guesses_but_one(shard: Mapping[str, Any]) -> Iterator[Axes]:
    """Yield the guesses less an input each, which is as long as there are samples by chance."""
    for axes in _guesses(shard):
        for left_out in axes if len(axes) > 1 else ():
            yield {name: dim for name, dim in axes.items() if name != left_out}


def resized(shard: Mapping[str, Any], axes: Axes, samples: int, extra: int = 0) -> dict[str, Any]:
    """Return the shard with `samples` of its samples, repeated where it has fewer.

    Args:
        extra: how many times sample `CHANGED` follows, so that data decide the same where it is
            replaced.
    """
    sized = dict(shard)
    for name, dim in axes.items():
        index = torch.tensor([*range(samples), *[CHANGED] * extra], device=shard[name].device)
        index %= shard[name].shape[dim]
        sized[name] = shard[name].index_select(dim, index)
    return sized


def _probe_replaced(
    model: CallableModel,
    shard: Mapping[str, Any],
    axes: Axes,
    position: Position,
    *,
    expected: Sequence[Use],
) -> tuple[ProbeRun, bool]:
    """Run on a shard in which sample `CHANGED` is replaced; return whether by other numbers, too.

    Args:
        expected: calls that noise may not change.
    """
    try:
        replaced = _replaced(shard, axes)
        run = _probe(model, replaced, position)
        retried = not same_calls((expected, run.uses))
    except ModelCallFailed:
        retried = True  # a column of floats may hold categories, of which noise makes unknown ones
    if retried:
        replaced = _replaced(shard, axes, noise=False)
        run = _probe(model, replaced, position)
    return run, any(not torch.equal(shard[name], replaced[name]) for name in axes)


def _replaced(shard: Mapping[str, Any], axes: Axes, *, noise: bool = True) -> dict[str, Any]:
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


def _others_moved(shard: Mapping[str, Any], axes: Axes) -> dict[str, Any]:
    """Let all samples but number `CHANGED` change places."""
    moved = dict(shard)
    for name, dim in axes.items():
        x = shard[name].movedim(dim, 0).clone()
        others = [sample for sample in range(len(x)) if sample != CHANGED]
        x[others] = x[others].roll(1, 0)
        moved[name] = x.movedim(0, dim)
    return moved


def _probe(
    model: CallableModel, shard: Mapping[str, Any], position: Position, *, modules: bool = False
) -> ProbeRun:
    """Run on a shard; with `modules` the uses say which module they are in."""
    # Of a shard that is recomputed no use is listed, for that would hold all that is computed.
    listed = not model.recomputes(position)
    log = UseLog(model.model if modules else None, model.parameters if listed else {})
    model.restore_buffers()  # before the log registers its hooks
    model.begin(position)
    before = generator_fingerprint()
    try:
        with custom_functions_shown():
            z = model.call(position, model.feed.copied(shard), observed=log)
    finally:
        log.remove_hooks()
    draws = generator_fingerprint() != before
    leaves = edges_of([z] if listed else [])
    return ProbeRun(log.uses, log.selections, log.sizes, z.detach(), draws, leaves)


def _coarsest(uses: Iterable[Use], rounding: torch.dtype) -> torch.dtype:
    """Return the floating-point dtype with the fewest digits: of a tensor, or of `rounding`."""
    tensors = (tensor for use in uses for tensor in (*use.inputs, *use.outputs))
    dtypes = {tensor.dtype for tensor in tensors if tensor.is_floating_point()}
    return max((rounding, *dtypes), key=lambda dtype: torch.finfo(dtype).eps)


class Mixing(NamedTuple):
    """A tensor that may hold several samples' numbers in one place."""

    place: str
    seen: bool  # whether another sample than the replaced one differs in it


def others_differ(second: Tensor, third: Tensor, axis: BatchAxis) -> bool:
    """Return whether a sample other than `CHANGED` differs beyond rounding."""
    if others_equal(second, third, axis):
        return False  # no rounding to be told from a difference
    differs = samples_that_differ(second, third, axis)
    differs[CHANGED] = False
    return bool(differs.any())


def refuse_coupling(uses: ProbeUses) -> NoReturn:
    """Raise the error that names the first module in which samples meet."""
    places = (mixing.place for mixing in mixing_layers(uses) if mixing.seen)
    where = next(places, "the model") if uses.alike else "the model"
    does = (
        BAGS
        if "(embedding_bag)" in where
        else "Batch norm in train mode does this: use mode='eval', or replace it by group norm; so "
        "does the step that a solver chooses for all samples: fix it"
    )
    raise CoupledSamples(
        f"replacing one sample changed the output of others; first seen in {where}: a sample then "
        f"has no gradient of its own. {does}. unchecked=('coupling',) turns this check off"
    )


@torch.no_grad()
def mixing_layers(uses: ProbeUses) -> Iterator[Mixing]:
    """Yield the places in which samples meet, or may; the runs called the same functions."""
    compared: set[int] = set()
    for one, two, three in zip(uses.first, uses.second, uses.third, strict=True):
        function = getattr(one.function, "__name__", str(one.function))
        for inputs, prefix in ((True, "what enters "), (False, "")):
            runs = (run.inputs if inputs else run.outputs for run in (one, two, three))
            for a, b, c in zip(*runs, strict=False):  # `torch.cat([q] * B)`: a tensor a sample
                if b is c or id(b) in compared:
                    continue
                compared.add(id(b))
                seen = _mixed(a, b, c, uses)
                if seen is not None:
                    yield Mixing(f"{prefix}{one.module or 'the model'!r} ({function})", seen)


def _mixed(a: Tensor, b: Tensor, c: Tensor, uses: ProbeUses) -> bool | None:
    """Return `Mixing.seen` of a tensor of the three runs, None where samples do not meet in it."""
    if any(map(of_a_transform, (a, b, c))):
        return False  # of a `torch.func` call that is over: its numbers cannot be read any more
    dim = changed_dim(a.shape, b.shape)
    if dim is not None and dim < 0:  # samples in two dims, as in a matrix that multiplies them
        return False
    if a.layout is not torch.strided:
        return None if same_values(b, c) else False
    if dim is None:  # of no sample, yet another if a sample is: a mean over the batch
        return False if b.shape != c.shape or not torch.equal(b, c) else None
    # An order is found for samples in a merged dim only where no other sample differs in it.
    merged = (a.shape[dim], b.shape[dim]) != (uses.samples, uses.samples + EXTRA)
    if merged or b.shape != c.shape:  # rows that data chose may be as many as samples
        return None
    return True if others_differ(b, c, BatchAxis(dim)) else None
