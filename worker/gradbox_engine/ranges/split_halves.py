"""The two halves of a set-loss job over ranges, for a loss that runs elsewhere.

    split_set_outputs               each range r:  Z_r = f(xᵢ; θ), i in r;  Z = cat(Z₁ … Z_k)
    split_gradient_at_cotangents    each range r:  G_r = Σ_{i in r} z̄ᵢᵀ ∂f(xᵢ; θ)/∂θ;  Σ_r G_r

They are to `set_outputs` and `gradient_at_cotangents` what `split_set_gradient` is to
`set_gradient`. A device may keep the graphs of its range for the second, see `held_job`: a range
that has the same shards there needs no first pass then, and no replay of shards whose graphs were
kept. Otherwise, where shards changed buffers, the second begins with a first pass, for the buffers
that each shard began with.

Cost: that of the two on one device divided among the devices, and for every range but the first at
most one forward more, see `independence`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gradbox_engine.model.calling.outputs import Outputs, as_z
from gradbox_engine.ranges import norm_statistics
from gradbox_engine.ranges.joining import (
    by_range,
    compare,
    joined,
    joined_rows,
    range_cotangents,
    rows_by_range,
)
from gradbox_engine.ranges.protocol import HOST, Devices, EarlierOutputs, Range, RangeOutputs
from gradbox_engine.ranges.reduction import completed
from gradbox_engine.ranges.split_job import RangeRun, SplitJob
from gradbox_engine.replay.comparison import ReplayComparison
from gradbox_engine.replay.cotangents import nonzero
from gradbox_engine.replay.gradient_at_cotangents import (
    CotangentGradient,
    FirstOutputs,
    given_cotangents,
    in_shard_order,
)
from gradbox_engine.replay.input_gradients import collect
from gradbox_engine.replay.phase_timer import PhaseTimer
from gradbox_engine.replay.set_outputs import SetOutputs
from gradbox_engine.replay.z import ordered
from gradbox_engine.requests import Group, Observer, Precision, Silent


@dataclass(frozen=True, kw_only=True)
class SplitOutputs(SetOutputs):
    """What `set_outputs` returns, and the ranges that it was computed in."""

    ranges: tuple[RangeRun, ...]


@dataclass(frozen=True, kw_only=True)
class SplitCotangentGradient(CotangentGradient):
    """What `gradient_at_cotangents` returns, and the ranges that it was computed in."""

    ranges: tuple[RangeRun, ...]


def split_set_outputs(
    devices: Devices,
    parts: Sequence[Range],
    groups: Sequence[Group],
    *,
    precision: Precision = "fp32",
    observer: Observer | None = None,
) -> SplitOutputs:
    """Return the outputs of all shards; the arguments are those of `split_set_gradient`.

    Args:
        devices: `held_job` has to be told to return buffers.

    Raises:
        CoupledShards: the shards cannot be split; the job needs one range.
        DeviceLost: no device is left, or one range has lost too many.
        EngineError: see `errors`.
    """
    clock, observer = PhaseTimer(HOST), observer or Silent()
    job = SplitJob(devices, parts, groups, precision=precision, observer=observer)
    with clock.timed("forward"):
        gathered = job.forward()
        job.check()
    whole = joined(groups, gathered, device=HOST)
    rows = joined_rows(groups, [outputs.rows for outputs in gathered])
    return SplitOutputs(
        outputs={group.name: as_z(ordered(whole[group.name], group)) for group in groups},
        rows={group: tuple(numbers) for group, numbers in rows.items()},
        buffers=norm_statistics.buffers_after(gathered),
        stateful=any(outputs.stateful for outputs in gathered),
        seconds=clock.seconds,
        retained=sum(run.retained for run in job.runs()),
        ranges=job.runs(),
    )


def split_gradient_at_cotangents(
    devices: Devices,
    parts: Sequence[Range],
    groups: Sequence[Group],
    cotangents: Mapping[str, Outputs],
    first: FirstOutputs,
    *,
    precision: Precision = "fp32",
    observer: Observer | None = None,
) -> SplitCotangentGradient:
    """Return dL/dθ from ∂L/∂Z; the arguments are those of `split_set_gradient`.

    Args:
        cotangents: as in `gradient_at_cotangents`.
        first: what `split_set_outputs`, or `set_outputs`, returned.

    Raises:
        CoupledShards: the shards cannot be split; the job needs one range.
        ReplayMismatch: a shard does not repeat its first outputs.
        DeviceLost: no device is left, or one range has lost too many.
        EngineError: see `errors`.
    """
    clock, observer = PhaseTimer(HOST), observer or Silent()
    job = SplitJob(devices, parts, groups, precision=precision, observer=observer)
    needed = nonzero(given_cotangents(groups, cotangents, first.rows))
    rows = rows_by_range(groups, parts, first.rows)
    outputs = by_range(rows, in_shard_order(groups, first.outputs))
    earlier = [EarlierOutputs(z, n) for z, n in zip(outputs, rows, strict=True)]
    with clock.timed("replay"):
        gathered: list[RangeOutputs] = []
        if first.stateful:
            gathered = job.forward()
            comparison = ReplayComparison(precision)
            for part in parts:
                compare(comparison, groups, part, gathered[part.index], earlier[part.index])
            comparison.finish()
        else:
            job.resume(earlier)
        asked = range_cotangents(
            groups,
            parts,
            rows,
            in_shard_order(groups, cotangents),
            needed,
            norms=[found.norms for found in gathered] or [{} for _ in parts],
        )
        gradients = job.replay(asked)
        sums = job.total()
    input_grads, unreached_inputs = collect(
        groups,
        gradients[0].inputs,
        {position: g for found in gradients for position, g in found.input_grads.items()},
        device=HOST,
    )
    parameters = gradients[0].parameters
    return SplitCotangentGradient(
        grads=completed(sums, parameters),
        unreached=(*(name for name in parameters if name not in sums), *unreached_inputs),
        retained=sum(found.retained for found in gradients),
        replayed=sum(found.replayed for found in gradients),
        replay_difference=max(found.replay_difference for found in gradients),
        seconds=clock.seconds,
        input_grads=input_grads or None,
        ranges=job.runs(),
    )
