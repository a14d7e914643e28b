"""A set-loss job held open on one device: what is done with a shard in either phase."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Unpack

from torch import Tensor, nn

from gradbox_engine.checkpoint import Checkpoints, NoCheckpoints
from gradbox_engine.errors import BadInputs
from gradbox_engine.model.calling.outputs import Outputs
from gradbox_engine.model.calling.shard_feed import Position
from gradbox_engine.model.prepared import Prepared, prepared
from gradbox_engine.model.wrt import select
from gradbox_engine.ranges.held_job import (
    NONE_BETWEEN_JOBS,
    GraphsBetweenJobs,
    HeldJob,
    HeldRange,
)
from gradbox_engine.ranges.protocol import Range, RangeCotangents
from gradbox_engine.replay.first_pass import GraphCalls
from gradbox_engine.replay.gradient_sums import GradientSums
from gradbox_engine.replay.kept_graphs import bytes_beside, places_of
from gradbox_engine.replay.replay import ReplayProgress, replay
from gradbox_engine.replay.retention import NONE_OLDER, GraphBudget, graph_budget
from gradbox_engine.replay.shard_record import ShardRecord
from gradbox_engine.replay.z import NumRows, concatenated
from gradbox_engine.requests import (
    CallKeywords,
    CallOptions,
    Group,
    Observer,
    Retain,
    Returned,
    Silent,
)

GRADS_ALONE: tuple[Returned, ...] = ("grads",)


@contextmanager
def held_job(
    model: nn.Module,
    groups: Sequence[Group],
    *,
    wrt: Sequence[str] | None = None,
    loss_parameters: Collection[str] = (),
    retain: Retain = 0,
    returns: Collection[Returned] = GRADS_ALONE,
    observer: Observer | None = None,
    checkpoints: Callable[[Range], Checkpoints] = lambda _: NoCheckpoints(),
    graphs: GraphsBetweenJobs = NONE_BETWEEN_JOBS,
    for_a_later_job: bool = False,
    **options: Unpack[CallKeywords],
) -> Iterator[HeldJob]:
    """Hold a model ready for ranges of a job; it is bit-identical afterwards.

    The arguments are those of `set_gradient`, and the same on every device of the job; the others
    are those of `HeldJob`.

    Args:
        loss_parameters: names that `wrt` may match besides, those of the objective's parameters.
        retain: of this device.

    Raises:
        EngineError: see `errors`.
    """
    every_input = "input_grads" in returns
    selection = select(model, wrt, others=loss_parameters, every_input=every_input)
    _refuse_shared_names(selection.parameters, loss_parameters)
    registered = places_of(model) if for_a_later_job else frozenset()
    with prepared(model, groups, selection, CallOptions(**options)) as ready:
        overlay_bytes = bytes_beside(registered, model) if for_a_later_job else 0
        budget = graph_budget(
            retain,
            ready.devices,
            sums_bytes=GradientSums(selection.parameters).expected_bytes(),
            overlay_bytes=overlay_bytes,
            older=graphs.older if for_a_later_job else NONE_OLDER,
        )
        passes = SetPasses(
            ready, observer or Silent(), selection.parameters, budget, for_a_later_job
        )
        yield HeldJob(
            passes,
            checkpoints,
            with_buffers="buffers" in returns,
            graphs=graphs,
            for_a_later_job=for_a_later_job,
            overlay_bytes=overlay_bytes,
        )


def _refuse_shared_names(parameters: Collection[str], of_loss: Collection[str]) -> None:
    """Check that results have one name each.

    Raises:
        BadInputs: a parameter of the objective is called like one of the model's.
    """
    both = sorted(set(parameters) & set(of_loss))
    if both:
        raise BadInputs(
            f"objective: expected names for its parameters that the model has none of, got {both}; "
            f"name them otherwise, or leave the model's out by wrt"
        )


@dataclass(frozen=True)
class SetPasses:
    """See `ranges.held_job.Passes`: Z forward, and z̄ᵢᵀ ∂f(xᵢ; θ)/∂θ back."""

    ready: Prepared
    observer: Observer
    parameters: Mapping[str, Tensor]
    budget: GraphBudget
    for_a_later_job: bool

    def sums(self) -> GradientSums:
        """Return one for each parameter."""
        return GradientSums(self.parameters)

    def first_call(self, num_shards: int) -> GraphCalls:
        """Return calls that keep graphs within the budget."""
        return GraphCalls(
            self.ready, num_shards, budget=self.budget, outlives_the_job=self.for_a_later_job
        )

    def joined(self, records: Sequence[ShardRecord]) -> tuple[dict[str, Outputs], NumRows]:
        """Return Z of the range, of which the records then hold views."""
        return concatenated(self.ready.calls.groups, {r.position: r.outputs for r in records})

    def second_pass(
        self, held: HeldRange, needed: Mapping[Position, Outputs], asked: RangeCotangents
    ) -> ReplayProgress:
        """Replay the range."""
        assert isinstance(held.sums, GradientSums)
        return replay(
            self.ready,
            held.records,
            needed,
            held.sums,
            observer=self.observer,
            resumed=held.second,
            after_shard=partial(held.checkpoint.after_second_call, held.records),
        )

    def keep_no_graphs(self) -> None:
        """Exhaust the budget."""
        self.budget.exhaust()

    def compared(self, outputs: Outputs) -> Outputs:
        """Return all of z."""
        return outputs

    def first_compared(self, record: ShardRecord) -> Outputs:
        """Return all of z."""
        return record.outputs
