"""The streaming replay, in phases that each take any range of shards.

    dL/dθ = Σᵢ z̄ᵢᵀ ∂f(xᵢ; θ)/∂θ,   z̄ᵢ = ∂g/∂zᵢ at Z = cat(z₁ … zₙ)

with no constant anywhere: a mean is a mean because g says so.

    forward(shards)              → zᵢ and what their replay needs
    objective.differentiate      → L and z̄ᵢ
    replay(shards, z̄ᵢ)           → gradients, added up

Source: Gao et al. 2021, "Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup",
section 3; random streams, buffers, retention and the comparison are ours.

Cost, with F and B one shard's forward and backward, n shards, k of them kept:
n(F + B) + (n − k)F. Memory beyond the model: k + 1 graphs, Z, ∂L/∂Z, one sum of gradients.

The last shard of a first pass is always kept, and its backward pass comes first: that costs no
memory, for nothing else is held then. The order of the sum is thus last, first, second, …, whatever
is kept, so on a CPU the result does not depend on the budget.

Not optimal: a shard's graph is freed as a whole, so the peak is one graph and not less. On a CPU
the bookkeeping costs about 0.3 ms a shard and 5 µs for each parameter, and counting a graph that is
kept another 10 µs for each tensor it saves, which shows in shards of some 30 ms.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from gradbox_engine.model.blame import blaming
from gradbox_engine.model.calls import Passage
from gradbox_engine.model.outputs import Outputs
from gradbox_engine.model.shard_feed import Position
from gradbox_engine.replay.beginnings import Beginnings
from gradbox_engine.replay.comparison import ReplayComparison, same_bits
from gradbox_engine.replay.gradient_sums import GradientSums
from gradbox_engine.replay.shard_record import Prepared, ShardRecord, with_room
from gradbox_engine.replay.ungraphed import GraphMissed
from gradbox_engine.requests import Observer


@dataclass(frozen=True)
class Replayed:
    """How a replay went: shards by where their graph came from, and the inputs' gradients."""

    num_retained: int
    num_replayed: int
    difference: float
    input_grads: dict[Position, dict[str, Tensor | None]]


def replay(
    prepared: Prepared,
    records: Sequence[ShardRecord],
    cotangents: Mapping[Position, Outputs],
    sums: GradientSums,
    *,
    comparison: ReplayComparison,
    observer: Observer,
) -> Replayed:
    """Carry each shard's cotangent back through the model and add up the gradients.

    Args:
        records: a range of shards, in the order of the sum; their graphs are used up.
        cotangents: z̄ᵢ by shard; a shard that is not named has none and is left out. They are
            scaled by `sums.scale` on their way, and what is added to the sums by its inverse.

    Raises:
        ReplayMismatch: a shard differs from its first pass by more than its dtype's tolerance.
        GraphMissed: the first pass has to be run again, with graphs.
    """
    for record in records:
        if record.position not in cotangents:
            record.drop()
    active = [record for record in records if record.position in cotangents]

    def attempt() -> Replayed:
        beginnings = Beginnings(prepared, records)
        return _replay(prepared, active, beginnings, cotangents, sums, comparison, observer)

    return with_room(attempt, active, undo=sums.clear)


def _replay(
    prepared: Prepared,
    records: Sequence[ShardRecord],
    beginnings: Beginnings,
    cotangents: Mapping[Position, Outputs],
    sums: GradientSums,
    comparison: ReplayComparison,
    observer: Observer,
) -> Replayed:
    waiting = deque(record.position for record in records if not record.kept)
    num_replayed = len(waiting)
    input_grads: dict[Position, dict[str, Tensor | None]] = {}
    for index, record in enumerate(records):
        observer.step("replay", index, len(records))
        passage = record.passage
        if passage is None:
            sums.take_back()
            passage = _call_again(prepared, record, beginnings, comparison)
            waiting.popleft()
        else:
            beginnings.use_graph(record)
        found = carry_back(prepared, record, passage, cotangents[record.position], sums)
        passage = None
        if found:
            input_grads[record.position] = found
        prepared.feed.prefetch(waiting[0] if waiting else None)
    difference = comparison.finish()
    observer.step("replay", len(records), len(records))
    return Replayed(len(records) - num_replayed, num_replayed, difference, input_grads)


def carry_back(
    prepared: Prepared,
    record: ShardRecord,
    passage: Passage,
    cotangent: Outputs,
    sums: GradientSums,
) -> dict[str, Tensor | None]:
    """Add one shard's gradients to the sums and return those of its inputs."""
    roots: list[Tensor | GradientEdge] = []
    gradients: list[Tensor] = []
    for name, z in passage.outputs.items():
        if name in cotangent and z.requires_grad:
            roots.append(z)
            gradients.append(_cast(cotangent[name], z.dtype, sums.scale))
    for tap, edge in passage.taps:
        if edge is not None:
            roots.append(edge)
            gradients.append(tap.start(record.outputs, sums.scale))
    for leaf in passage.inputs.values():
        leaf.grad = None  # what the model's own backward passes may have left
    if roots:
        prepared.calls.begin(record.position)  # for what draws on the way back
        # Without inputs=, which reentrant checkpointing does not admit; nothing else requires grad.
        sums.lend()
        with (
            blaming("the backward pass", prepared.calls.where(record.position)),
            prepared.calls.backward(),
        ):
            torch.autograd.backward(roots, gradients)  # type: ignore[arg-type]
    record.drop()
    return {
        name: None if leaf.grad is None else leaf.grad / sums.scale
        for name, leaf in passage.inputs.items()
    }


def _call_again(
    prepared: Prepared,
    record: ShardRecord,
    beginnings: Beginnings,
    comparison: ReplayComparison,
) -> Passage:
    """Put a shard through once more and compare it with the first time.

    Raises:
        GraphMissed: it went without a graph, and does not do the same to the last bit.
    """
    while True:
        beginnings.put_back(record)
        passage = prepared.calls(record.position, prepared.feed.take(record.position))
        if passage.intact:
            break
    if not record.graphed and prepared.device.type == "cpu":
        if prepared.buffers.carry_graphs() or not same_bits(passage.outputs, record.outputs):
            raise GraphMissed
    else:
        where = prepared.calls.where(record.position)
        comparison.compare(where, passage.outputs, record.outputs)
    return passage


def _cast(gradient: Tensor, dtype: torch.dtype, scale: float) -> Tensor:
    return (gradient if scale == 1.0 else gradient * scale).to(dtype)
