"""`gradient_at_cotangents`: the replay alone, for a loss that ran elsewhere.

    dL/dθ = Σᵢ z̄ᵢᵀ ∂f(xᵢ; θ)/∂θ,   with z̄ᵢ = ∂L/∂zᵢ given

It begins with what `set_outputs` left: the records with their kept graphs; or, where those are
gone, the outputs that it returned. If the shards changed no buffer, these are all that a replay
needs. If they did, the first pass runs again, for the buffers that each shard began with, and its z
are compared with the outputs that the cotangents belong to. The sum runs in the same order in every
case, so on a CPU the result has the same bits, and those of `set_gradient`.

Cost, with F and B one shard's forward and backward, n shards, k of them kept: nB + (n − k)F; from
outputs alone n(B + F), and up to nF more for a model whose buffers change. A shard whose cotangent
is zero needs no backward pass. Memory beyond the model: one graph and those kept, Z, ∂L/∂Z, and one
sum of gradients.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Unpack

from torch import Tensor, nn

from gradbox_engine.checkpoint import Checkpoints
from gradbox_engine.errors import BadInputs
from gradbox_engine.model.calling.outputs import Outputs
from gradbox_engine.model.calling.shard_feed import Position, all_positions
from gradbox_engine.model.prepared import Prepared, prepared
from gradbox_engine.model.wrt import select
from gradbox_engine.replay.checkpoint import JobCheckpoint
from gradbox_engine.replay.comparison import ReplayComparison
from gradbox_engine.replay.cotangents import nonzero
from gradbox_engine.replay.first_pass import first_pass
from gradbox_engine.replay.fp16_scaling import scaled_replay
from gradbox_engine.replay.gradient_sums import GradientSums
from gradbox_engine.replay.input_gradients import InputGrads, collect
from gradbox_engine.replay.kept_graphs import KeptPass
from gradbox_engine.replay.phase_timer import PhaseTimer
from gradbox_engine.replay.retention import GraphBudget, graph_budget
from gradbox_engine.replay.shard_record import ShardRecord, free_graphs
from gradbox_engine.replay.z import NumRows, ShardRows, unordered
from gradbox_engine.requests import (
    CallKeywords,
    CallOptions,
    Group,
    Observer,
    Phase,
    Retain,
    Silent,
)


@dataclass(frozen=True)
class CotangentGradient:
    """Gradients, and how the replay went; the fields are those of `SetGradient`."""

    grads: dict[str, Tensor]
    unreached: tuple[str, ...]
    retained: int
    replayed: int
    replay_difference: float
    seconds: dict[Phase, float]
    input_grads: InputGrads | None


@dataclass(frozen=True)
class FirstOutputs:
    """What `set_outputs` returned: Z by group and name, each shard's rows, and `stateful`."""

    outputs: Mapping[str, Outputs]
    rows: NumRows
    stateful: bool = True


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
    observer = observer or Silent()
    selection = select(model, wrt, every_input=input_grads)
    sums = GradientSums(selection.parameters)
    with prepared(model, groups, selection, call_options) as ready:
        clock = PhaseTimer(*ready.devices)
        given = given_cotangents(groups, cotangents, first.rows)
        needed = nonzero(given)
        checkpoint = JobCheckpoint(checkpoints, ready, sums)
        resumed = checkpoint.resumed()
        with clock.timed("replay"):
            if resumed.second is not None:
                records = resumed.records
            elif isinstance(first, KeptPass):
                parameters = frozenset(selection.parameters)
                records = first.usable_for(given, parameters=parameters, inputs=ready.inputs)
            elif first.stateful:
                budget = graph_budget(retain, ready.devices, sums_bytes=sums.expected_bytes())
                records = _repeated_first_pass(ready, first, budget, observer)
            else:
                records = _records_of(ready, _parts(groups, first.outputs, first.rows))
            free_graphs(records, given.keys() - needed.keys())
            replayed = scaled_replay(
                ready,
                records,
                needed,
                sums,
                observer=observer,
                resumed=resumed.second,
                after_shard=partial(checkpoint.after_second_call, records),
            )
        grads = sums.named()
        found_inputs, unreached_inputs = collect(
            groups, ready.inputs, replayed.input_grads, device=ready.device
        )
    return CotangentGradient(
        grads=grads,
        unreached=(*sums.unreached(), *unreached_inputs),
        retained=replayed.num_retained,
        replayed=replayed.num_replayed,
        replay_difference=replayed.difference,
        seconds=clock.seconds,
        input_grads=found_inputs or None,
    )


def given_cotangents(
    groups: Sequence[Group], cotangents: Mapping[str, Outputs], rows: NumRows
) -> dict[Position, Outputs]:
    """Return the cotangents of the shards that have one.

    Raises:
        BadInputs: there is none.
    """
    parts = _parts(groups, cotangents, rows)
    given = {position: part for position, part in parts.items() if part}
    if not given:
        raise BadInputs("cotangents: expected one for a group of the job, got none")
    return given


def in_shard_order(groups: Sequence[Group], whole: Mapping[str, Outputs]) -> dict[str, Outputs]:
    """Return tensors shaped like the Z that was returned, in the order of the shards."""
    return {
        group.name: unordered(whole[group.name], group) for group in groups if group.name in whole
    }


def _parts(
    groups: Sequence[Group], whole: Mapping[str, Outputs], rows: NumRows
) -> dict[Position, Outputs]:
    """Return each shard's part of tensors shaped like the Z that was returned."""
    return ShardRows(groups, rows).parts(in_shard_order(groups, whole))


def _records_of(ready: Prepared, outputs: Mapping[Position, Outputs]) -> list[ShardRecord]:
    """Return records of shards none of which changed a buffer."""
    state = ready.buffers.first
    return [
        ShardRecord(position, part, penalties=[], before=state, after=state)
        for position, part in outputs.items()
    ]


def _repeated_first_pass(
    ready: Prepared, first: FirstOutputs, budget: GraphBudget, observer: Observer
) -> list[ShardRecord]:
    """Run the first pass again, and compare it with the first time.

    Raises:
        ReplayMismatch: a shard gives other outputs.
    """
    positions = all_positions(ready.calls.groups)
    records = first_pass(ready, positions, budget=budget, observer=observer)
    expected = _parts(ready.calls.groups, first.outputs, first.rows)
    comparison = ReplayComparison(ready.options.precision)
    for record in records:
        where = ready.calls.where(record.position)
        comparison.compare(where, record.outputs, expected[record.position])
    comparison.finish()
    return records
