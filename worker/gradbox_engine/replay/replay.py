"""The replay: each shard's cotangent is carried back through the model, and the gradients add up.

    dL/dθ = Σᵢ z̄ᵢᵀ ∂f(xᵢ; θ)/∂θ,   z̄ᵢ = ∂g/∂zᵢ at Z = cat(z₁ … zₙ)

with no constant anywhere: a mean is a mean because g says so. A shard whose graph was kept needs
its backward pass alone. Every other one is put through the model once more, under its own random
stream and the buffers that it began with, and its z is compared with that of the first pass.

The sum runs over the last shard first, whose graph the first pass has just kept, and then from the
first shard on. Every entry point uses this order, whatever was kept, so that on a CPU the result
has the same bits.

Source: Gao et al. 2021, "Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup",
section 3; random streams, buffers, retention and the comparison are ours.

Cost, with F and B one shard's forward and backward, n shards, k graphs kept: nB + (n − k)F. Memory
beyond the model: the kept graphs and one more, Z, ∂L/∂Z, one sum of gradients.

In float16: it ends at 6e-8 below and 65504 above. A replay under its autocast, or of a model that
has such parameters, multiplies all cotangents by one power of two that lifts the largest entry to
about 256, and divides the sums by it; where a gradient overflows all the same, the replay is
repeated at a 64th of the scale, ten times at most. What overflows even then is infinite in any
precision: the last replay has the first scale again, at which other gradients have all their
digits. All cotangents have one scale: what is below 1e-7 of the largest loses digits, then is zero.
Source: Micikevicius et al. 2018, "Mixed Precision Training", section 3.2.

Not optimal: a shard's graph is freed as a whole, so the peak is one graph and not less.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from gradbox_engine.checkpoint import Checkpoint
from gradbox_engine.errors import ReplayMismatch
from gradbox_engine.model.calling.blame import blaming
from gradbox_engine.model.calling.calls import ShardGraph
from gradbox_engine.model.calling.outputs import Outputs
from gradbox_engine.model.calling.shard_feed import Position
from gradbox_engine.model.comparison import ReplayComparison
from gradbox_engine.model.precision import fp16_scale
from gradbox_engine.model.prepared import Prepared
from gradbox_engine.replay.gradient_sums import GradientSums
from gradbox_engine.replay.shard_record import ShardRecord
from gradbox_engine.requests import Observer
from gradbox_factors.term import all_finite

LARGEST = 2.0**8
STEP = 2.0**-6
MOST_STEPS = 10

ShardInputGrads = dict[str, Tensor | None]
AfterShard = Callable[["ReplayProgress", ReplayComparison], None]


@dataclass
class ReplayProgress:
    """How far a replay has come, in the order of the sum."""

    num_done: int = 0  # shards whose gradient has been added
    num_retained: int = 0  # those of them whose graph was kept
    difference: float = 0.0  # the largest, see `comparison`
    input_grads: dict[Position, ShardInputGrads] = field(default_factory=dict)

    @property
    def num_replayed(self) -> int:
        """Shards that went through the model once more."""
        return self.num_done - self.num_retained

    @property
    def fallbacks(self) -> dict[str, int]:
        """None: a replay takes no tangents."""
        return {}

    def state(self) -> Checkpoint:
        """Return all of it, for another process."""
        named = [
            (f"{position.group}/{position.shard}/{name}", gradient)
            for position, gradients in self.input_grads.items()
            for name, gradient in gradients.items()
        ]
        facts = {
            "done": self.num_done,
            "retained": self.num_retained,
            "difference": self.difference,
            "without_gradient": [key for key, gradient in named if gradient is None],
        }
        return Checkpoint({key: g for key, g in named if g is not None}, facts)

    @classmethod
    def of(cls, state: Checkpoint) -> ReplayProgress:
        """Go on from a `state` of another process."""
        facts = state.facts
        progress = cls(facts["done"], facts["retained"], facts["difference"])
        for key in (*facts["without_gradient"], *state.tensors):
            group, shard, name = key.split("/", 2)
            named = progress.input_grads.setdefault(Position(int(group), int(shard)), {})
            named[name] = state.tensors.get(key)
        return progress


def replay(
    prepared: Prepared,
    records: Sequence[ShardRecord],
    cotangents: Mapping[Position, Outputs],
    sums: GradientSums,
    *,
    observer: Observer,
    resumed: Checkpoint | None = None,
    after_shard: AfterShard = lambda *_: None,
) -> ReplayProgress:
    """Carry each shard's cotangent back through the model and add up the gradients.

    Args:
        records: a range of shards in order; the graphs of those that have a cotangent are used up.
        cotangents: z̄ᵢ by shard; a shard that is not named has none and is left out.
        sums: where gradients are added; through float16 at its scale, which is divided out.
        resumed: how far an earlier process came, whose sums these are, at their scale.
        after_shard: called when a shard's gradient has been added.

    Raises:
        ReplayMismatch: a shard differs from its first pass by more than its dtype's tolerance.
        ModelCallFailed: a call or a backward pass failed.
        GraphInBuffer: a gradient would pass through a buffer to the shard before.
        torch.OutOfMemoryError: one shard's graph does not fit.
    """
    progress = None if resumed is None else ReplayProgress.of(resumed)
    once = partial(
        _replay_once,
        prepared,
        records,
        cotangents,
        sums,
        observer=observer,
        after_shard=after_shard,
    )
    entries = [tensor for part in cotangents.values() for tensor in part.values()]
    if not prepared.in_float16 or not all(map(all_finite, entries)):
        return once(progress)
    first = fp16_scale(entries, largest=LARGEST)
    if resumed is None:
        sums.scale = first
    for _ in range(MOST_STEPS + 1):
        replayed = once(progress)
        inputs = [g for named in replayed.input_grads.values() for g in named.values()]
        if sums.finite() and all(all_finite(g) for g in inputs if g is not None):
            return replayed
        sums.clear()
        sums.scale *= STEP
        progress = None
    sums.scale = first
    return once(None)


def _replay_once(
    prepared: Prepared,
    records: Sequence[ShardRecord],
    cotangents: Mapping[Position, Outputs],
    sums: GradientSums,
    progress: ReplayProgress | None,
    *,
    observer: Observer,
    after_shard: AfterShard,
) -> ReplayProgress:
    """Replay at the scale that the sums have."""
    progress = progress or ReplayProgress()
    active = _in_order(prepared, records, cotangents)
    comparison = ReplayComparison(prepared.options.precision, largest=progress.difference)
    left = active[progress.num_done :]
    without_graph = deque(record.position for record in left if record.graph is None)
    for record in left:
        observer.step("replay", progress.num_done, len(active))
        graph = record.graph
        if graph is None:
            without_graph.popleft()
            graph = _called_again(prepared, record)
            where = prepared.calls.where(record.position)
            comparison.compare(where, graph.outputs, record.outputs)
        else:
            prepared.buffers.restore(record.after)
            progress.num_retained += 1
        if record.position in cotangents:
            progress.input_grads[record.position] = carry_back(
                prepared, record, graph, cotangents[record.position], sums
            )
        record.free_graph()
        del graph
        progress.num_done += 1
        after_shard(progress, comparison)
        prepared.feed.prefetch(without_graph[0] if without_graph else None)
    progress.difference = comparison.finish()
    observer.step("replay", len(active), len(active))
    return progress


def _in_order(
    prepared: Prepared, records: Sequence[ShardRecord], cotangents: Container[Position]
) -> list[ShardRecord]:
    """Return the shards to go through: those with a cotangent, the last one first.

    Where attributes are not restored shard by shard, what a shard finds is left by those before it:
    all go through in order, but the last one if its graph is kept, and of no other one is it used.
    """
    before, last = records[:-1], records[-1:]
    if not prepared.buffers.beyond.in_order:
        return [record for record in (*last, *before) if record.position in cotangents]
    for record in before:
        record.free_graph()
    kept = any(record.graph is not None for record in last)
    return [*last, *before] if kept else [*before, *last]


def _called_again(prepared: Prepared, record: ShardRecord) -> ShardGraph:
    """Put a shard through the model once more, under the buffers that it began with."""
    for _ in range(2):
        prepared.buffers.restore(record.before)
        graph = prepared.calls(record.position, prepared.feed.take(record.position))
        # Activations under penalties that the model overwrites are copied from the next call on.
        # The first pass finds them; a job that goes on from a checkpoint has none of its own.
        if graph.intact:
            return graph
    raise ReplayMismatch(
        f"{prepared.calls.where(record.position)}: expected the model to overwrite the same "
        f"activations in place in every call, but it overwrote another one under a penalty"
    )


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
            scaled = cotangent[name] if sums.scale == 1.0 else cotangent[name] * sums.scale
            gradients.append(scaled.to(z.dtype))
    for tap, edge in graph.taps:
        if edge is not None:
            roots.append(edge)
            gradients.append(tap.start(record.outputs, sums.scale))
    for leaf in graph.inputs.values():
        leaf.grad = None  # what the model's own backward passes may have left
    prepared.calls.begin(record.position)  # a backward pass may draw numbers, too
    # Without inputs=, which reentrant checkpointing does not admit. Nothing else requires grad
    # but the zeros in the place of graphs that buffers brought along.
    with (
        prepared.buffers.left_out_undone(),
        sums.added_up(),
        blaming("the backward pass", prepared.calls.where(record.position)),
        prepared.calls.backward(),
    ):
        torch.autograd.backward(roots, gradients)  # type: ignore[arg-type]
    return {
        name: None if leaf.grad is None else leaf.grad / sums.scale
        for name, leaf in graph.inputs.items()
    }
