"""The two halves of a set-loss job, for a loss that runs elsewhere.

    set_outputs               each range r:  Z_r = f(xᵢ; θ), i in r;  Z = cat(Z₁ … Z_k)
    gradient_at_cotangents    each range r:  G_r = Σ_{i in r} z̄ᵢᵀ ∂f(xᵢ; θ)/∂θ;  Σ_r G_r

The first half runs under the random streams and buffers that a gradient of the same shards would
see, and with the same parameters requiring grad: kernels that are only taken where nothing does
would round otherwise than the replay will.

A device may keep the graphs of its range for the second half, see `held_job`: a range that has the
same shards there needs no first pass then, and no replay of shards whose graphs were kept. Where
they are gone, the outputs are all that a replay needs, if the shards changed no buffer. If they
did, the second half begins with a first pass, for the buffers that each shard began with, and its z
are compared with the outputs that the cotangents belong to. The sum runs in the same order in every
case, so on a CPU the result has the same bits, and those of `set_gradient`.

Cost, with F and B one shard's forward and backward, n shards, k of them kept: nF, then nB + (n -
k)F; from outputs alone n(B + F), and up to nF more for a model whose buffers change. A shard whose
cotangent is zero needs no backward pass. It is divided among the devices, and for every range but
the first there is at most one forward more, see `independence`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Unpack

import torch
from torch import Tensor, nn

from gradbox_engine.checkpoint import Checkpoints, NoCheckpoints
from gradbox_engine.errors import BadInputs
from gradbox_engine.model.calling.outputs import Outputs, as_z
from gradbox_engine.model.calling.shard_feed import Position
from gradbox_engine.model.comparison import ReplayComparison
from gradbox_engine.ranges import norm_statistics
from gradbox_engine.ranges.held_job import GraphsBetweenJobs
from gradbox_engine.ranges.joining import (
    by_range,
    compare,
    joined,
    joined_rows,
    range_cotangents,
    rows_by_range,
)
from gradbox_engine.ranges.one_device import OneDevice, one_range
from gradbox_engine.ranges.protocol import HOST, Devices, EarlierOutputs, Range, RangeOutputs
from gradbox_engine.ranges.split_job import SplitJob
from gradbox_engine.replay.cotangents import nonzero
from gradbox_engine.replay.kept_graphs import KeptPass
from gradbox_engine.replay.phase_timer import PhaseTimer
from gradbox_engine.replay.retention import NONE_OLDER, OlderGraphs
from gradbox_engine.replay.z import NumRows, ShardRows, ordered, unordered
from gradbox_engine.requests import (
    CallKeywords,
    CallOptions,
    CotangentGradient,
    Group,
    Observer,
    Phase,
    Precision,
    RangeRun,
    Retain,
    Returned,
    Z,
)
from gradbox_engine.set_loss.held_passes import GRADS_ALONE, held_job
from gradbox_engine.set_loss.set_gradient import carried_back


@dataclass(frozen=True, kw_only=True)
class SetOutputs:
    """Z of each group, in the order that the group asks for and in the model's own dtype.

    `rows` has each shard's number of rows in Z, before that order; None where z has no dimension.
    `buffers` are the model's buffers advanced once per shard, and `stateful` says whether a second
    half needs what shards left in them. `kept` is there if graphs are kept here, `retained` shards
    have one here or elsewhere. `changed_attributes` are the names of plain attributes that changed,
    with which no later job begins.
    """

    outputs: dict[str, Z]
    rows: dict[str, tuple[int | None, ...]]
    buffers: dict[str, Tensor]
    stateful: bool
    seconds: dict[Phase, float]
    ranges: tuple[RangeRun, ...]
    retained: int = 0
    changed_attributes: tuple[str, ...] = ()
    kept: KeptPass | None = None


@dataclass(frozen=True)
class FirstOutputs:
    """What `set_outputs` returned: Z by group and name, each shard's rows, and `stateful`."""

    outputs: Mapping[str, Outputs]
    rows: NumRows
    stateful: bool = True


def set_outputs(
    model: nn.Module,
    groups: Sequence[Group],
    *,
    wrt: Sequence[str] | None = None,
    retain: Retain = 0,
    older: OlderGraphs = NONE_OLDER,
    observer: Observer | None = None,
    checkpoints: Checkpoints | None = None,
    **options: Unpack[CallKeywords],
) -> SetOutputs:
    """Return Z, the outputs of all shards: the first half of `set_gradient`.

    `gradient_at_cotangents` is the second half, once somebody has differentiated a loss at Z. The
    model is bit-identical afterwards, also after an error.

    Args:
        groups: shards and the entry points they go through, in order.
        wrt: what `gradient_at_cotangents` will differentiate; see `set_gradient`.
        retain: memory in bytes for graphs that are kept for it, or "auto": what is free. They
            live as long as `SetOutputs.kept`.
        older: graphs that earlier calls kept, which take of the same `retain`.
        observer: called before each shard; may raise to stop the job.
        checkpoints: where the state of a long job is written, and read when it begins again.
        options: how the model is called, see `CallOptions`.

    Raises:
        EngineError: see `errors`; each says what was expected, what came, and what to do.
        torch.OutOfMemoryError: one shard does not fit.
    """
    call_options = CallOptions(**options).without_penalties("set_outputs")
    passes: list[KeptPass] = []
    returns: tuple[Returned, ...] = ("buffers",)
    with held_job(
        model,
        groups,
        wrt=wrt,
        retain=retain,
        returns=returns,
        observer=observer,
        checkpoints=lambda _: checkpoints or NoCheckpoints(),
        graphs=GraphsBetweenJobs(keep=lambda _, kept: passes.append(kept), older=older),
        for_a_later_job=True,
        **options,
    ) as job:
        answer = split_set_outputs(
            OneDevice(job),
            one_range(groups),
            groups,
            precision=call_options.precision,
            device=job.device,
        )
    return replace(answer, kept=passes[0] if passes else None)


def gradient_at_cotangents(
    model: nn.Module,
    groups: Sequence[Group],
    cotangents: Mapping[str, Outputs],
    first: FirstOutputs | KeptPass,
    *,
    wrt: Sequence[str] | None = None,
    retain: Retain = 0,
    input_grads: bool = False,
    observer: Observer | None = None,
    checkpoints: Checkpoints | None = None,
    **options: Unpack[CallKeywords],
) -> CotangentGradient:
    """Return dL/dθ from ∂L/∂Z: the second half of `set_gradient`, after `set_outputs`.

    Model, groups and options must be those that `set_outputs` was called with: each replayed shard
    is compared with its first outputs.

    Args:
        cotangents: by group and name, of Z's shape; one that is missing is zero.
        first: what `set_outputs` returned, or what it kept. Graphs that differentiate something
            other than `wrt` are not used. Those of shards without a cotangent stay.
        wrt: what is differentiated; see `set_gradient`.
        retain: memory in bytes for graphs, where the first pass has to run again.
        input_grads: differentiate by every input where `wrt` names none.
        observer: called before each shard; may raise to stop the job.
        checkpoints: where the state of a long replay is written, and read when it begins again.

    Raises:
        ReplayMismatch: a shard does not repeat its first outputs.
        EngineError: see `errors`; each says what was expected, what came, and what to do.
        torch.OutOfMemoryError: one shard's graph does not fit.
    """
    call_options = CallOptions(**options).without_penalties("gradient_at_cotangents")
    kept = first if isinstance(first, KeptPass) else None
    returns: tuple[Returned, ...] = ("input_grads",) if input_grads else GRADS_ALONE
    with held_job(
        model,
        groups,
        wrt=wrt,
        retain=retain,
        returns=returns,
        observer=observer,
        checkpoints=lambda _: checkpoints or NoCheckpoints(),
        graphs=GraphsBetweenJobs(of=lambda _: kept),
        **options,
    ) as job:
        return split_gradient_at_cotangents(
            OneDevice(job),
            one_range(groups),
            groups,
            cotangents,
            # Records have the outputs, and the buffers that each shard began with.
            FirstOutputs({}, first.rows, stateful=False) if isinstance(first, KeptPass) else first,
            precision=call_options.precision,
            device=job.device,
        )


def split_set_outputs(
    devices: Devices,
    parts: Sequence[Range],
    groups: Sequence[Group],
    *,
    precision: Precision = "fp32",
    device: torch.device = HOST,
) -> SetOutputs:
    """Return the outputs of all shards; the arguments are those of `split_set_gradient`.

    Args:
        devices: `held_job` has to be told to return buffers, and of a later job.

    Raises:
        CoupledShards: the shards cannot be split; the job needs one range.
        DeviceLost: no device is left, or one range has lost too many.
        EngineError: see `errors`.
    """
    clock = PhaseTimer(device)
    job = SplitJob(devices, parts, groups, precision=precision)
    with clock.timed("forward"):
        gathered = job.forward()
        job.check()
    whole = joined(groups, gathered, device=device)
    rows = joined_rows(groups, [outputs.rows for outputs in gathered])
    return SetOutputs(
        outputs={group.name: as_z(ordered(whole[group.name], group)) for group in groups},
        rows={group: tuple(numbers) for group, numbers in rows.items()},
        buffers=norm_statistics.buffers_after(gathered),
        stateful=any(outputs.stateful for outputs in gathered),
        seconds=clock.seconds,
        ranges=job.runs(),
        retained=sum(run.retained for run in job.runs()),
        changed_attributes=gathered[-1].changed_attributes,
    )


def split_gradient_at_cotangents(
    devices: Devices,
    parts: Sequence[Range],
    groups: Sequence[Group],
    cotangents: Mapping[str, Outputs],
    first: FirstOutputs,
    *,
    precision: Precision = "fp32",
    device: torch.device = HOST,
) -> CotangentGradient:
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
    clock = PhaseTimer(device)
    job = SplitJob(devices, parts, groups, precision=precision)
    needed = nonzero(_given(groups, cotangents, first.rows))
    rows = rows_by_range(groups, parts, first.rows)
    outputs = by_range(rows, _in_shard_order(groups, first.outputs))
    earlier = [EarlierOutputs(z, n) for z, n in zip(outputs, rows, strict=True)]
    gathered: list[RangeOutputs] = []
    if first.stateful:
        with clock.timed("forward"):
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
        _in_shard_order(groups, cotangents),
        needed,
        norms=[of_range.norms for of_range in gathered] or [{} for _ in parts],
    )
    return carried_back(job, asked, groups, clock, device=device)


def _given(
    groups: Sequence[Group], cotangents: Mapping[str, Outputs], rows: NumRows
) -> dict[Position, Outputs]:
    """Return the cotangents of the shards that have one.

    Raises:
        BadInputs: there is none.
    """
    parts = ShardRows(groups, rows).parts(_in_shard_order(groups, cotangents))
    given = {position: part for position, part in parts.items() if part}
    if not given:
        raise BadInputs("cotangents: expected one for a group of the job, got none")
    return given


def _in_shard_order(groups: Sequence[Group], whole: Mapping[str, Outputs]) -> dict[str, Outputs]:
    """Return tensors shaped like the Z that was returned, in the order of the shards."""
    return {
        group.name: unordered(whole[group.name], group) for group in groups if group.name in whole
    }
