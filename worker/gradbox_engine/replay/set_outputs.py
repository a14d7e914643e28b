"""`set_outputs`: the first pass alone, for a loss that runs elsewhere.

    Z = cat(z₁ … zₙ),   zᵢ = f(xᵢ; θ)

under the random streams and buffers that a gradient of the same shards would see, and with the same
parameters requiring grad: kernels that are only taken where nothing does would round otherwise than
the replay will. Graphs may be kept for the second half, `gradient_at_cotangents`.

Cost: n forwards; memory beyond the model: Z, one shard's graph, and the graphs that are kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Unpack

from torch import Tensor, nn

from gradbox_engine.checkpoint import Checkpoints
from gradbox_engine.model.calling.outputs import as_z
from gradbox_engine.model.calling.shard_feed import all_positions
from gradbox_engine.model.prepared import Prepared, prepared
from gradbox_engine.model.wrt import select
from gradbox_engine.replay.checkpoint import JobCheckpoint
from gradbox_engine.replay.first_pass import first_pass
from gradbox_engine.replay.gradient_sums import GradientSums
from gradbox_engine.replay.kept_graphs import KeptPass, bytes_beside, places_of
from gradbox_engine.replay.phase_timer import PhaseTimer
from gradbox_engine.replay.retention import NONE_OLDER, OlderGraphs, graph_budget
from gradbox_engine.replay.shard_record import ShardRecord, any_changed_state
from gradbox_engine.replay.z import concatenated, ordered
from gradbox_engine.requests import (
    CallKeywords,
    CallOptions,
    Group,
    Observer,
    Phase,
    Retain,
    Silent,
    Z,
)


@dataclass(frozen=True)
class SetOutputs:
    """Z of each group, in the order that the group asks for and in the model's own dtype.

    `rows` has each shard's number of rows in Z, before that order; None where z has no dimension.
    `buffers` are the model's buffers advanced once per shard, and `stateful` says whether any of
    them changed. `kept` is there if graphs are kept, of `retained` shards. `changed_attributes` are
    the names of plain attributes that changed, with which no later job begins.
    """

    outputs: dict[str, Z]
    rows: dict[str, tuple[int | None, ...]]
    buffers: dict[str, Tensor]
    stateful: bool
    seconds: dict[Phase, float]
    kept: KeptPass | None = None
    retained: int = 0
    changed_attributes: tuple[str, ...] = ()


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
    selection = select(model, wrt)
    registered = places_of(model)
    call_options = CallOptions(**options).without_penalties("set_outputs")
    with prepared(model, groups, selection, call_options) as ready:
        clock = PhaseTimer(*ready.devices)
        overlay_bytes = bytes_beside(registered, model)
        sums = GradientSums(selection.parameters)
        checkpoint = JobCheckpoint(checkpoints, ready, sums)
        done = checkpoint.resumed().records
        with clock.timed("forward"):
            records = first_pass(
                ready,
                all_positions(groups),
                done,
                budget=graph_budget(
                    retain,
                    ready.devices,
                    sums_bytes=sums.expected_bytes(),
                    overlay_bytes=overlay_bytes,
                    older=older,
                ),
                observer=observer or Silent(),
                outlives_the_job=True,
                after_shard=checkpoint.after_first_call,
            )
        return _answer(ready, records, frozenset(selection.parameters), overlay_bytes, clock)


def _answer(
    ready: Prepared,
    records: list[ShardRecord],
    parameters: frozenset[str],
    overlay_bytes: int,
    clock: PhaseTimer,
) -> SetOutputs:
    groups = ready.calls.groups
    whole, num_rows = concatenated(groups, {r.position: r.outputs for r in records})
    rows = {group: tuple(numbers) for group, numbers in num_rows.items()}
    kept = KeptPass(records, parameters, ready.inputs, rows, overlay_bytes)
    after = records[-1].after
    beyond = ready.buffers.beyond
    lacks = beyond.in_order or beyond.lacks_counts or beyond.lacks_fillings
    if beyond.in_order or (lacks and kept.num_kept < len(records)):
        kept.free()  # a second half would replay some shards without what those before them left
    return SetOutputs(
        outputs={group.name: as_z(ordered(whole[group.name], group)) for group in groups},
        rows=rows,
        buffers=ready.buffers.named(after),
        stateful=lacks or any_changed_state(records),
        seconds=clock.seconds,
        kept=kept if kept.num_kept else None,
        retained=kept.num_kept,
        changed_attributes=after.beyond.names if after.beyond else (),
    )
