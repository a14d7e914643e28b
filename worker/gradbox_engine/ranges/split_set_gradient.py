"""`split_set_gradient`: one set-loss job over ranges of its shards, wherever these run.

    each range r:   Z_r = f(xᵢ; θ), i in r                      RangeDevice.forward
    here:           Z = cat(Z₁ … Z_k),  L = g(Z, extras),  z̄ = ∂L/∂Z
    each range r:   G_r = Σ_{i in r} z̄ᵢᵀ ∂f(xᵢ; θ)/∂θ           RangeDevice.replay
    in a tree:      dL/dθ = Σ_r G_r                             Devices.added

The result depends on the ranges and not on which device ran which, or when. Where devices compute
alike, it is that of `set_gradient_in_ranges` over the same ranges to the last bit, and with one
range that of `set_gradient`.

Cost: that of `set_gradient` divided among the devices, and for every range but the first at most
one forward more, see `independence`. Moved: Z and ∂L/∂Z once, and k - 1 sums of gradients; one more
where `Devices.fetched` brings the last one here.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Unpack

import torch

from gradbox_engine.model.calling.shard_rng import generators_restored
from gradbox_engine.model.precision import arithmetic
from gradbox_engine.ranges import norm_statistics
from gradbox_engine.ranges.joining import joined, joined_rows, range_cotangents
from gradbox_engine.ranges.protocol import HOST, Devices, Range, RangeOutputs
from gradbox_engine.ranges.reduction import completed
from gradbox_engine.ranges.split_job import RangeRun, SplitJob
from gradbox_engine.replay.cotangents import LossDerivatives, differentiate, nonzero
from gradbox_engine.replay.input_gradients import collect
from gradbox_engine.replay.phase_timer import PhaseTimer
from gradbox_engine.replay.set_gradient import GRADS_ALONE, refuse_shared_names
from gradbox_engine.replay.z import ShardRows
from gradbox_engine.requests import (
    CallKeywords,
    CallOptions,
    Group,
    Objective,
    Observer,
    Returned,
    SetGradient,
    Silent,
)


@dataclass(frozen=True, kw_only=True)
class SplitGradient(SetGradient):
    """What `set_gradient` returns, and the ranges that it was computed in."""

    ranges: tuple[RangeRun, ...]


def split_set_gradient(
    devices: Devices,
    parts: Sequence[Range],
    groups: Sequence[Group],
    objective: Objective,
    *,
    returns: Collection[Returned] = GRADS_ALONE,
    device: torch.device = HOST,
    observer: Observer | None = None,
    **options: Unpack[CallKeywords],
) -> SplitGradient:
    """Return dL/dθ for L = g(Z, extras) + Σ penalties.

    Args:
        devices: each holds the job ready, see `held_job`, with the same groups and options.
        parts: ranges that cover all shards in order, see `cut`.
        groups: of the whole job; of their shards no more is read than `held_job` says of those
            outside a device's ranges.
        objective: g, which runs here.
        returns: as in `set_gradient`; `held_job` has to be call_options, too.
        device: where g runs.
        observer: told of the shards of ranges that have ended, and about once a second.

    Raises:
        CoupledShards: the shards cannot be split; the job needs one range.
        DeviceLost: no device is left, or one range has lost too many.
        ReplayMismatch: a range that ran twice did not give the same outputs.
        EngineError: see `errors`.
    """
    call_options, observer, clock = CallOptions(**options), observer or Silent(), PhaseTimer(device)
    job = SplitJob(devices, parts, groups, precision=call_options.precision, observer=observer)
    with clock.timed("forward"):
        gathered = job.forward()
    with clock.timed("cotangents"):
        observer.step("cotangents", 0, 1)
        loss = _differentiated(gathered, groups, objective, call_options, device=device)
        rows = [outputs.rows for outputs in gathered]
        by_shard = ShardRows(groups, joined_rows(groups, rows)).parts(loss.cotangents)
        cotangents = range_cotangents(
            groups,
            parts,
            rows,
            loss.cotangents,
            by_shard if call_options.penalties else nonzero(by_shard),
            norms=[outputs.norms for outputs in gathered],
        )
        observer.step("cotangents", 1, 1)
    with clock.timed("replay"):
        gradients = job.replay(cotangents)
        sums = job.total()
    parameters = gradients[0].parameters
    input_grads, unreached_inputs = collect(
        groups,
        gradients[0].inputs,
        {position: g for found in gradients for position, g in found.input_grads.items()},
        device=HOST,
    )
    unreached = [name for name in parameters if name not in sums]
    return SplitGradient(
        loss=loss.loss,
        grads=completed(sums, parameters) | loss.parameters,
        unreached=(*unreached, *unreached_inputs, *loss.unreached),
        shards={group.name: len(group.shards) for group in groups},
        retained=sum(found.retained for found in gradients),
        replayed=sum(found.replayed for found in gradients),
        replay_difference=max(found.replay_difference for found in gradients),
        seconds=clock.seconds,
        buffers=norm_statistics.buffers_after(gathered) if "buffers" in returns else None,
        outputs=loss.seen if "outputs" in returns else None,
        cotangents=loss.seen_cotangents if "cotangents" in returns else None,
        input_grads=input_grads or None,
        ranges=job.runs(),
    )


def _differentiated(
    gathered: Sequence[RangeOutputs],
    groups: Sequence[Group],
    objective: Objective,
    options: CallOptions,
    *,
    device: torch.device,
) -> LossDerivatives:
    """Return L and ∂L/∂Z, in the arithmetic and from the random stream of `set_gradient`."""
    refuse_shared_names(gathered[0].parameters, objective)
    penalties = torch.cat([outputs.penalties for outputs in gathered])
    with torch.inference_mode(False), generators_restored(), arithmetic(options.precision):
        return differentiate(
            objective,
            joined(groups, gathered, device=device),
            groups,
            device=device,
            seed=options.seed,
            widened=options.widened,
            penalty=float(penalties.sum()) if len(penalties) else None,
        )
