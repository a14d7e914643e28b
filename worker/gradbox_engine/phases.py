"""The streaming replay, in phases that each take any range of shards.

    dL/dθ = Σᵢ z̄ᵢᵀ ∂f(xᵢ; θ)/∂θ,   z̄ᵢ = ∂g/∂zᵢ at Z = cat(z₁ … zₙ)

with no constant anywhere: a mean is a mean because g says so.

    forward(shards)              → zᵢ and what their replay needs
    objective.differentiate      → L and z̄ᵢ
    replay(shards, z̄ᵢ)           → gradients, added up

Source: Gao et al. 2021, "Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup",
section 3; random streams, buffers, retention and the comparison are ours.

Cost, with F and B one shard's forward and backward, n shards, k of them kept:
n(F + B) + (n − k)F. Memory beyond the model: k + 1 graphs, Z twice, one sum of gradients.

The last shard of a first pass is always kept, and its backward pass comes first: that costs no
memory, for nothing else is held then. The order of the sum is thus last, first, second, …, whatever
is kept, so on a CPU the result does not depend on the budget.

Not optimal: a shard's graph is freed as a whole, so the peak is one graph and not less. The
bookkeeping costs about 0.5 ms a shard and 10 µs for each parameter and buffer, which shows in
shards that take less than some 20 ms.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from gradbox_engine.accumulation import GradientSums
from gradbox_engine.buffers import Buffers, Snapshot
from gradbox_engine.calls import ModelCalls, Passage
from gradbox_engine.comparison import ReplayComparison
from gradbox_engine.errors import ModelCallFailed
from gradbox_engine.failures import blaming
from gradbox_engine.feed import Feed, Position
from gradbox_engine.job import Observer
from gradbox_engine.outputs import Outputs
from gradbox_engine.retention import GraphBudget
from gradbox_engine.saved_tensors import SavedTensors, needs_its_own_graph

T = TypeVar("T")


@dataclass(frozen=True)
class Prepared:
    """A model made ready for one job, and the ways to put shards through it."""

    calls: ModelCalls
    feed: Feed
    buffers: Buffers
    inputs: Mapping[str, Sequence[str]]  # by group, the arguments whose gradients are wanted
    device: torch.device
    parameter_storages: frozenset[int]  # addresses


@dataclass
class ShardRecord:
    """What the first pass leaves of a shard.

    `outputs` are z without a graph, `penalties` the penalties' values, `before` the buffers at its
    beginning. `passage` is there while its graph is kept, which has `num_bytes` of saved tensors.
    """

    position: Position
    outputs: Outputs
    penalties: list[Tensor]
    before: Snapshot
    passage: Passage | None = None
    num_bytes: int = 0

    @property
    def kept(self) -> bool:
        """Whether a backward pass can begin from here without a replay."""
        return self.passage is not None

    def drop(self) -> None:
        """Let go of the graph."""
        self.passage, self.num_bytes = None, 0


@dataclass(frozen=True)
class FirstPass:
    """The records of a range of shards, and the buffers after the last of them."""

    records: list[ShardRecord]
    after: Snapshot


def forward(
    prepared: Prepared,
    positions: Sequence[Position],
    *,
    before: Snapshot,
    budget: GraphBudget,
    observer: Observer,
    keep_last: bool = True,
) -> FirstPass:
    """Put a range of shards through the model, in order.

    Args:
        before: the buffers at the beginning of the range.
        budget: how much of the graphs may be kept.
        keep_last: whether the last shard's is kept whatever the budget, for a backward pass that
            comes next.
    """
    records: list[ShardRecord] = []
    buffers = prepared.buffers
    buffers.restore(before)
    for position, following in pairwise([*positions, None]):
        assert position is not None
        observer.step("forward", len(records), len(positions))
        last = keep_last and following is None
        call = partial(_first_call, prepared, position, before, budget, last=last)

        def start_over(before: Snapshot = before) -> None:
            budget.exhaust()
            buffers.restore(before)

        records.append(with_room(call, records, undo=start_over))
        before = buffers.advance(before)
        prepared.feed.prefetch(following)
    observer.step("forward", len(positions), len(positions))
    return FirstPass(records, before)


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
    """
    for record in records:
        if record.position not in cotangents:
            record.drop()
    active = [record for record in records if record.position in cotangents]
    attempt = partial(_replay, prepared, active, cotangents, sums, comparison, observer)
    return with_room(attempt, active, undo=sums.clear)


def _replay(
    prepared: Prepared,
    records: Sequence[ShardRecord],
    cotangents: Mapping[Position, Outputs],
    sums: GradientSums,
    comparison: ReplayComparison,
    observer: Observer,
) -> Replayed:
    num_retained = 0
    input_grads: dict[Position, dict[str, Tensor | None]] = {}
    for index, record in enumerate(records):
        observer.step("replay", index, len(records))
        num_retained += record.kept
        cotangent = cotangents[record.position]
        input_grads[record.position] = carry_back(prepared, record, cotangent, sums, comparison)
        waiting = (other.position for other in records[index + 1 :] if not other.kept)
        prepared.feed.prefetch(next(waiting, None))
    difference = comparison.finish()
    observer.step("replay", len(records), len(records))
    return Replayed(num_retained, len(records) - num_retained, difference, input_grads)


def with_room(
    attempt: Callable[[], T],
    records: Sequence[ShardRecord],
    undo: Callable[[], None] = lambda: None,
) -> T:
    """Run an attempt; where memory runs out while graphs are kept, drop them and run it again.

    Raises:
        torch.OutOfMemoryError: it runs out with nothing kept, too.
    """
    try:
        return attempt()
    except torch.OutOfMemoryError:
        if not any(record.kept for record in records):
            raise
    # Outside the handler, for its traceback holds on to the failed attempt's tensors.
    for record in records:
        record.drop()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    undo()
    return attempt()


def _first_call(
    prepared: Prepared, position: Position, before: Snapshot, budget: GraphBudget, *, last: bool
) -> ShardRecord:
    limit_bytes = math.inf if last else budget.room_bytes()
    passage, saved = None, None
    if not budget.unmeasured:
        saved = SavedTensors(
            limit_bytes=limit_bytes,
            parameters=prepared.parameter_storages,
            buffers=prepared.buffers.storages(),
        )
        passage = _call_saving(prepared, position, saved)
    if passage is None:
        # The model differentiates in its own forward pass, so its graph has to be whole.
        budget.unmeasured = True
        prepared.buffers.restore(before)
        passage = prepared.calls(position, prepared.feed.take(position), with_values=True)
    outputs = {name: _compact(z) for name, z in passage.outputs.items()}
    record = ShardRecord(position, outputs, passage.penalties, before)
    if saved is not None and limit_bytes and not last:
        budget.count(saved)
    whole = saved.kept if saved is not None and not budget.unmeasured else last
    if whole and passage.intact:
        record.passage = passage
        record.num_bytes = 0 if saved is None else saved.num_bytes
    return record


def _call_saving(prepared: Prepared, position: Position, saved: SavedTensors) -> Passage | None:
    """Call the model with its saved tensors under control; None if it does not bear that."""
    arguments = prepared.feed.take(position)
    try:
        with saved.saving():
            return prepared.calls(position, arguments, with_values=True)
    except ModelCallFailed as error:
        if not needs_its_own_graph(error.__cause__):
            raise
    return None


def carry_back(
    prepared: Prepared,
    record: ShardRecord,
    cotangent: Outputs,
    sums: GradientSums,
    comparison: ReplayComparison,
) -> dict[str, Tensor | None]:
    """Add one shard's gradients to the sums and return those of its inputs."""
    where = prepared.calls.where(record.position)
    passage = record.passage
    if passage is None:
        passage = _call_again(prepared, record)
        comparison.compare(where, passage.outputs, record.outputs)
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
    if roots:
        # Without inputs=, which reentrant checkpointing does not admit; nothing else requires grad.
        with blaming("the backward pass", where), prepared.calls.backward(), sums.collecting():
            torch.autograd.backward(roots, gradients)  # type: ignore[arg-type]
    record.drop()
    return {
        name: None if leaf.grad is None else leaf.grad / sums.scale
        for name, leaf in passage.inputs.items()
    }


def _call_again(prepared: Prepared, record: ShardRecord) -> Passage:
    while True:
        prepared.buffers.restore(record.before)
        passage = prepared.calls(record.position, prepared.feed.take(record.position))
        if passage.intact:
            return passage


def _cast(gradient: Tensor, dtype: torch.dtype, scale: float) -> Tensor:
    return (gradient if scale == 1.0 else gradient * scale).to(dtype)


def _compact(z: Tensor) -> Tensor:
    """Return z's values without its graph, nor the larger tensor that it may be a view of."""
    z = z.detach()
    return z if z.untyped_storage().nbytes() == z.nbytes else z.clone()
