"""`set_gradient`: first pass → cotangents → replay, on a model that is restored afterwards.

    for i:  zᵢ = f(xᵢ; θ)                       first_pass
    L = g(cat(z₁ … zₙ)),  z̄ = ∂L/∂Z             cotangents
    for i:  dL/dθ += z̄ᵢᵀ ∂f(xᵢ; θ)/∂θ           replay

Cost, with F and B one shard's forward and backward, n shards, k of whose graphs the budget holds:
n(F + B) + (n − k)F.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial
from typing import Unpack

import torch
from torch import Tensor, nn

from gradbox_engine.checkpoint import Checkpoints
from gradbox_engine.errors import BadInputs
from gradbox_engine.model.calling.outputs import Outputs
from gradbox_engine.model.calling.shard_feed import Position, all_positions
from gradbox_engine.model.prepared import Prepared, prepared
from gradbox_engine.model.state.snapshots import Snapshot
from gradbox_engine.model.wrt import select
from gradbox_engine.replay.checkpoint import JobCheckpoint
from gradbox_engine.replay.cotangents import LossDerivatives, differentiate, nonzero
from gradbox_engine.replay.first_pass import first_pass
from gradbox_engine.replay.fp16_scaling import scaled_replay
from gradbox_engine.replay.gradient_sums import GradientSums
from gradbox_engine.replay.input_gradients import collect
from gradbox_engine.replay.phase_timer import PhaseTimer
from gradbox_engine.replay.replay import ReplayProgress
from gradbox_engine.replay.retention import graph_budget
from gradbox_engine.replay.shard_record import ShardRecord, free_graphs, retried_without_kept_graphs
from gradbox_engine.replay.z import ShardRows, concatenated
from gradbox_engine.requests import (
    CallKeywords,
    CallOptions,
    Group,
    Objective,
    Observer,
    Retain,
    Returned,
    SetGradient,
    Silent,
)

GRADS_ALONE: tuple[Returned, ...] = ("grads",)


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
    **options: Unpack[CallKeywords],
) -> SetGradient:
    """Return dL/dθ for L = g(Z, extras) + Σ penalties, one shard's graph in memory at a time.

        shards = [{"input_ids": ids} for ids in all_ids.split(16)]
        found = set_gradient(model, [Group("z", shards)], Objective(info_nce), mode="train")
        found.grads["encoder.layer.5.output.dense.weight"]  # of the parameter's shape

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
        options: how the model is called, see `CallOptions`.

    Raises:
        EngineError: see `errors`; each says what was expected, what came, and what to do.
        torch.OutOfMemoryError: one shard's graph does not fit.
    """
    call_options = CallOptions(**options)
    observer = observer or Silent()
    every_input = "input_grads" in returns
    selection = select(model, wrt, others=objective.parameters, every_input=every_input)
    refuse_shared_names(selection.parameters, objective)
    with prepared(model, groups, selection, call_options) as ready:
        clock = PhaseTimer(*ready.devices)
        sums = GradientSums(selection.parameters)
        checkpoint = JobCheckpoint(checkpoints, ready, sums)
        resumed = checkpoint.resumed()
        with clock.timed("forward"):
            records = first_pass(
                ready,
                all_positions(groups),
                resumed.records,
                budget=graph_budget(retain, ready.devices, sums_bytes=sums.expected_bytes()),
                observer=observer,
                after_shard=checkpoint.after_first_call,
            )
        with clock.timed("cotangents"):
            observer.step("cotangents", 0, 1)
            loss, cotangents = _cotangents(ready, objective, records)
            observer.step("cotangents", 1, 1)
        with clock.timed("replay"):
            replayed = scaled_replay(
                ready,
                records,
                cotangents,
                sums,
                observer=observer,
                resumed=resumed.second,
                after_shard=partial(checkpoint.after_second_call, records),
            )
        return _result(ready, records[-1].after, loss, sums, replayed, clock, returns)


def refuse_shared_names(parameters: Collection[str], objective: Objective) -> None:
    """Check that results have one name each.

    Raises:
        BadInputs: a parameter of the objective is called like one of the model's.
    """
    both = sorted(set(parameters) & objective.parameters.keys())
    if both:
        raise BadInputs(
            f"objective: expected names for its parameters that the model has none of, got {both}; "
            f"name them otherwise, or leave the model's out by wrt"
        )


def _cotangents(
    ready: Prepared, objective: Objective, records: Sequence[ShardRecord]
) -> tuple[LossDerivatives, dict[Position, Outputs]]:
    """Return L, and z̄ of the shards that need a backward pass; with penalties all of them do."""
    groups = ready.calls.groups
    joined = partial(concatenated, groups, {r.position: r.outputs for r in records})
    whole, num_rows = retried_without_kept_graphs(joined, records, undo=lambda: None)
    rows = ShardRows(groups, num_rows)
    penalty = _total([value for record in records for value in record.penalties])
    differentiated = partial(
        differentiate,
        objective,
        whole,
        groups,
        device=ready.device,
        seed=ready.options.seed,
        widened=ready.options.widened,
        penalty=penalty,
    )
    loss = retried_without_kept_graphs(differentiated, records, undo=lambda: None)
    parts = rows.parts(loss.cotangents)
    needed = parts if ready.options.penalties else nonzero(parts)
    free_graphs(records, parts.keys() - needed.keys())
    return loss, needed


def _result(
    ready: Prepared,
    after: Snapshot,
    loss: LossDerivatives,
    sums: GradientSums,
    replayed: ReplayProgress,
    clock: PhaseTimer,
    returns: Collection[Returned],
) -> SetGradient:
    groups = ready.calls.groups
    input_grads, unreached_inputs = collect(
        groups, ready.inputs, replayed.input_grads, device=ready.device
    )
    return SetGradient(
        loss=loss.loss,
        grads=sums.named() | loss.parameters,
        unreached=(*sums.unreached(), *unreached_inputs, *loss.unreached),
        shards={group.name: len(group.shards) for group in groups},
        retained=replayed.num_retained,
        replayed=replayed.num_replayed,
        replay_difference=replayed.difference,
        seconds=clock.seconds,
        buffers=ready.buffers.named(after) if "buffers" in returns else None,
        outputs=loss.seen if "outputs" in returns else None,
        cotangents=loss.seen_cotangents if "cotangents" in returns else None,
        input_grads=input_grads or None,
    )


def _total(values: Sequence[Tensor]) -> float | None:
    """Return the sum of 0-dim tensors, None of none; waits for the device once."""
    return float(torch.stack([value.double() for value in values]).sum()) if values else None
