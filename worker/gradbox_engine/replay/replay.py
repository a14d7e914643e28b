"""The replay: each shard's cotangent is carried back through the model, and the gradients add up.

    dL/dθ = Σᵢ z̄ᵢᵀ ∂f(xᵢ; θ)/∂θ,   z̄ᵢ = ∂g/∂zᵢ at Z = cat(z₁ … zₙ)

with no constant anywhere: a mean is a mean because g says so. A shard whose graph was kept needs
its backward pass alone. Every other one is put through the model once more, under its own random
stream and the buffers that it began with, and its z is compared with that of the first pass.

The sum runs over the last shard first, whose graph the first pass has just kept, and then from the
first shard on. Every entry point goes this way, whatever was kept, so that on a CPU the result has
the same bits.

Source: Gao et al. 2021, "Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup",
section 3; random streams, buffers, retention and the comparison are ours.

Cost, with F and B one shard's forward and backward, n shards, k graphs kept: nB + (n − k)F. Memory
beyond the model: the kept graphs and one more, Z, ∂L/∂Z, one sum of gradients.

Not optimal: a shard's graph is freed as a whole, so the peak is one graph and not less.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from gradbox_engine.errors import ReplayMismatch
from gradbox_engine.model.blame import blaming
from gradbox_engine.model.calls import ShardGraph
from gradbox_engine.model.outputs import Outputs
from gradbox_engine.model.prepared import Prepared
from gradbox_engine.model.shard_feed import Position
from gradbox_engine.replay.comparison import ReplayComparison
from gradbox_engine.replay.gradient_sums import GradientSums
from gradbox_engine.replay.shard_record import ShardRecord, retried_without_kept_graphs
from gradbox_engine.requests import Observer

ShardInputGrads = dict[str, Tensor | None]


@dataclass(frozen=True)
class Replayed:
    """How a replay went: shards by where their graph came from, and the inputs' gradients."""

    num_retained: int
    num_replayed: int
    difference: float  # the largest, see `comparison`
    input_grads: dict[Position, ShardInputGrads]


def replay(
    prepared: Prepared,
    records: Sequence[ShardRecord],
    cotangents: Mapping[Position, Outputs],
    sums: GradientSums,
    *,
    observer: Observer,
) -> Replayed:
    """Carry each shard's cotangent back through the model and add up the gradients.

    Args:
        records: a range of shards in order; the graphs of those that have a cotangent are used up.
        cotangents: z̄ᵢ by shard; a shard that is not named has none and is left out.
        sums: cotangents are multiplied by its scale, and what is added divided.

    Raises:
        ReplayMismatch: a shard differs from its first pass by more than its dtype's tolerance.
        ModelCallFailed: a call or a backward pass failed.
        torch.OutOfMemoryError: one shard's graph does not fit.
    """
    last_first = [*records[-1:], *records[:-1]]
    active = [record for record in last_first if record.position in cotangents]
    once = partial(_replay, prepared, active, cotangents, sums, observer=observer)
    return retried_without_kept_graphs(once, active, undo=sums.clear)


def _replay(
    prepared: Prepared,
    records: Sequence[ShardRecord],
    cotangents: Mapping[Position, Outputs],
    sums: GradientSums,
    *,
    observer: Observer,
) -> Replayed:
    comparison = ReplayComparison(prepared.options.precision)
    without_graph = [record.position for record in records if record.graph is None]
    num_replayed = 0
    input_grads: dict[Position, ShardInputGrads] = {}
    for index, record in enumerate(records):
        observer.step("replay", index, len(records))
        graph = record.graph
        if graph is None:
            prepared.buffers.restore(record.before)
            graph = prepared.calls(record.position, prepared.feed.take(record.position))
            where = prepared.calls.where(record.position)
            comparison.compare(where, graph.outputs, record.outputs)
            if not graph.intact:  # the first pass has found those that the shards overwrite
                raise ReplayMismatch(
                    f"{where}: expected the replay to leave the activations under penalties as "
                    f"the first pass did, but the model overwrote one in place"
                )
            num_replayed += 1
        else:
            prepared.buffers.restore(record.after)
        found = carry_back(prepared, record, graph, cotangents[record.position], sums)
        record.free_graph()
        del graph
        if found:
            input_grads[record.position] = found
        prepared.feed.prefetch(next(iter(without_graph[num_replayed:]), None))
    difference = comparison.finish()
    observer.step("replay", len(records), len(records))
    return Replayed(len(records) - num_replayed, num_replayed, difference, input_grads)


def carry_back(
    prepared: Prepared,
    record: ShardRecord,
    graph: ShardGraph,
    cotangent: Outputs,
    sums: GradientSums,
) -> ShardInputGrads:
    """Add one shard's gradients to the sums and return those of its inputs."""
    roots: list[Tensor | GradientEdge] = []
    gradients: list[Tensor] = []
    for name, z in graph.outputs.items():
        if name in cotangent and z.requires_grad:
            roots.append(z)
            gradients.append((cotangent[name] * sums.scale).to(z.dtype))
    for tap, edge in graph.taps:
        if edge is not None:
            roots.append(edge)
            gradients.append(tap.start(record.outputs, sums.scale))
    for leaf in graph.inputs.values():
        leaf.grad = None  # what the model's own backward passes may have left
    if roots:
        prepared.calls.begin(record.position)  # a backward pass may draw numbers, too
        # Without inputs=, which reentrant checkpointing does not admit; nothing else requires grad.
        with (
            sums.added_up(),
            blaming("the backward pass", prepared.calls.where(record.position)),
            prepared.calls.backward(),
        ):
            torch.autograd.backward(roots, gradients)  # type: ignore[arg-type]
    return {
        name: None if leaf.grad is None else leaf.grad / sums.scale
        for name, leaf in graph.inputs.items()
    }
