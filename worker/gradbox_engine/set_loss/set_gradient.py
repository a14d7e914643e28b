"""`set_gradient`: first pass → cotangents → replay, on one device or over ranges of the shards.

    each range r:   Z_r = f(xᵢ; θ), i in r                      RangeDevice.forward
    here:           Z = cat(Z₁ … Z_k),  L = g(Z, extras),  z̄ = ∂L/∂Z
    each range r:   G_r = Σ_{i in r} z̄ᵢᵀ ∂f(xᵢ; θ)/∂θ           RangeDevice.replay
    in a tree:      dL/dθ = Σ_r G_r                             Devices.added

On one device there is one range, and nothing is copied. The result depends on the ranges and not on
which device ran which, or when: where devices compute alike, it is to the last bit that of the same
ranges on one.

Cost, with F and B one shard's forward and backward, n shards, k of whose graphs the budget holds:
n(F + B) + (n − k)F, divided among the devices; and for every range but the first at most one
forward more, see `independence`. Moved between devices: Z and ∂L/∂Z once, and k - 1 sums of
gradients; one more where `Devices.fetched` brings the last one here.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Unpack

import torch
from torch import nn

from gradbox_engine.checkpoint import Checkpoints, NoCheckpoints
from gradbox_engine.ranges import norm_statistics
from gradbox_engine.ranges.joining import joined, joined_rows, range_cotangents
from gradbox_engine.ranges.one_device import OneDevice, one_range
from gradbox_engine.ranges.protocol import (
    HOST,
    Devices,
    Range,
    RangeCotangents,
    RangeOutputs,
)
from gradbox_engine.ranges.reduction import completed
from gradbox_engine.ranges.split_job import SplitJob
from gradbox_engine.replay.cotangents import LossDerivatives, differentiate, nonzero
from gradbox_engine.replay.input_gradients import collect
from gradbox_engine.replay.phase_timer import PhaseTimer
from gradbox_engine.replay.z import ShardRows
from gradbox_engine.requests import (
    CallKeywords,
    CallOptions,
    CotangentGradient,
    Group,
    Objective,
    Observer,
    Recomputed,
    Retain,
    Returned,
    SetGradient,
    Silent,
)
from gradbox_engine.set_loss.held_passes import GRADS_ALONE, held_job


def set_gradient(
    model: nn.Module,
    groups: Sequence[Group],
    objective: Objective,
    *,
    wrt: Sequence[str] | None = None,
    retain: Retain = 0,
    returns: Collection[Returned] = GRADS_ALONE,
    observer: Observer | None = None,
    checkpoints: Checkpoints | None = None,
    ranges: Sequence[Range] | None = None,
    **options: Unpack[CallKeywords],
) -> SetGradient:
    """Return dL/dθ for L = g(Z, extras) + Σ penalties, one shard's graph in memory at a time.

        shards = [{"input_ids": ids} for ids in all_ids.split(16)]
        gradient = set_gradient(model, [Group("z", shards)], Objective(info_nce), mode="train")
        gradient.grads["encoder.layer.5.output.dense.weight"]  # of the parameter's shape

    Args:
        model: on one device, or on several between which it moves tensors itself; bit-identical
            afterwards, also after an error.
        groups: shards and the entry points they go through, in order.
        objective: g, what it reads beside Z, and leaves of its own to differentiate.
        wrt: patterns over parameter names, and "inputs.NAME"; None is every floating-point
            parameter, whatever its `requires_grad`.
        retain: memory in bytes for graphs kept from the first pass, or "auto": what is free.
        returns: what to give back beside the gradients, of "buffers", "outputs", "cotangents", and
            "input_grads": those of the inputs that `wrt` names, which come in any case, or of all.
        observer: told before each shard; may raise to stop the job.
        checkpoints: where the state of a long job is written, and read when it begins again.
        ranges: to run one after the other as many devices would, each from the registered buffers
            on; None is one of all shards.
        options: how the model is called, see `CallOptions`.

    Raises:
        EngineError: see `errors`; each says what was expected, what came, and what to do.
        torch.OutOfMemoryError: one shard's graph does not fit.
    """
    with held_job(
        model,
        groups,
        wrt=wrt,
        loss_parameters=objective.parameters,
        retain=retain,
        returns=returns,
        observer=observer,
        checkpoints=lambda _: checkpoints or NoCheckpoints(),
        **options,
    ) as job:
        return split_set_gradient(
            OneDevice(job),
            ranges or one_range(groups),
            groups,
            objective,
            returns=returns,
            device=job.device,
            observer=observer,
            **options,
        )


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
) -> SetGradient:
    """Return dL/dθ for L = g(Z, extras) + Σ penalties.

    Args:
        devices: each holds the job ready, see `held_job`, with the same groups and options.
        parts: ranges that cover all shards in order, see `cut`.
        groups: of the whole job; of their shards no more is read than `held_job` says of those
            outside a device's ranges.
        objective: g, which runs here.
        returns: as in `set_gradient`, and as `held_job` was told.
        device: where g runs.
        observer: told of the cotangents; `Devices.tick` of the shards.

    Raises:
        CoupledShards: the shards cannot be split; the job needs one range.
        DeviceLost: no device is left, or one range has lost too many.
        ReplayMismatch: a range that ran twice did not give the same outputs.
        EngineError: see `errors`.
    """
    call_options, observer, clock = CallOptions(**options), observer or Silent(), PhaseTimer(device)
    job = SplitJob(devices, parts, groups, precision=call_options.precision)
    with clock.timed("forward"):
        gathered = job.forward()
    with clock.timed("cotangents"):
        observer.step("cotangents", 0, 1)
        loss = devices.between_phases(
            lambda: _differentiated(gathered, groups, objective, call_options, device=device),
            call_options.precision,
        )
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
    carried = carried_back(job, cotangents, groups, clock, device=device)
    return SetGradient(
        **vars(
            replace(
                carried,
                grads=carried.grads | loss.parameters,
                unreached=(*carried.unreached, *loss.unreached),
            )
        ),
        loss=loss.loss,
        shards={group.name: len(group.shards) for group in groups},
        buffers=norm_statistics.buffers_after(gathered) if "buffers" in returns else None,
        outputs=loss.seen if "outputs" in returns else None,
        cotangents=loss.seen_cotangents if "cotangents" in returns else None,
    )


def carried_back(
    job: SplitJob,
    cotangents: Sequence[RangeCotangents],
    groups: Sequence[Group],
    clock: PhaseTimer,
    *,
    device: torch.device,
) -> CotangentGradient:
    """Replay all ranges, and return the sums of their gradients."""
    with clock.timed("replay"):
        gradients = job.replay(cotangents)
        sums = job.total()
    parameters = gradients[0].parameters
    input_grads, unreached_inputs = collect(
        groups,
        gradients[0].inputs,
        {position: g for of_range in gradients for position, g in of_range.input_grads.items()},
        device=device,
    )
    return CotangentGradient(
        grads=completed(sums, parameters, device=device),
        unreached=(*(name for name in parameters if name not in sums), *unreached_inputs),
        retained=sum(of_range.retained for of_range in gradients),
        replayed=sum(of_range.replayed for of_range in gradients),
        recomputed=Recomputed.joined(of_range.recomputed for of_range in gradients),
        replay_difference=max(of_range.replay_difference for of_range in gradients),
        seconds=clock.seconds,
        ranges=job.runs(),
        input_grads=input_grads or None,
    )


def _differentiated(
    gathered: Sequence[RangeOutputs],
    groups: Sequence[Group],
    objective: Objective,
    options: CallOptions,
    *,
    device: torch.device,
) -> LossDerivatives:
    """Return L and ∂L/∂Z."""
    penalties = torch.cat([outputs.penalties for outputs in gathered])
    return differentiate(
        objective,
        joined(groups, gathered, device=device),
        groups,
        device=device,
        seed=options.seed,
        widened=options.widened,
        penalty=float(penalties.sum()) if len(penalties) else None,
    )
