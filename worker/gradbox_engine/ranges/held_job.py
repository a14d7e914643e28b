"""A job on one device, held open between its two phases.

The model stays prepared and the graphs that the budget has room for stay in memory from `forward`
of a range to its `replay`. Random streams belong to a shard's number in the whole job, so it does
not matter on which device, or in which range, a shard runs. Groups are therefore those of the whole
job. Shards outside of a device's ranges may hold tensors on torch's `meta` device: of them, only
names, dtypes and sizes are ever read.

Several ranges may be held on one device. They share its budget, and each begins with the registered
buffers. All calls come from the thread that opened the job.

A forward job may leave its ranges' graphs on the device, where a gradient job at their cotangents
finds them in place of a first pass. A range whose graphs are gone is replayed.

A range has a checkpoint of its own, as a job on one device has: whoever takes it up again, here or
on another device, goes on behind the last shard that is in it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar, Unpack

from torch import Tensor, nn

from gradbox_engine.checkpoint import Checkpoints, NoCheckpoints
from gradbox_engine.model.calling.shard_feed import Position, all_positions
from gradbox_engine.model.prepared import Prepared, prepared
from gradbox_engine.model.wrt import select
from gradbox_engine.ranges import norm_statistics
from gradbox_engine.ranges.graphs_between_jobs import NONE_BETWEEN_JOBS, GraphsBetweenJobs
from gradbox_engine.ranges.independence import check_independence, compared_by_replay
from gradbox_engine.ranges.protocol import (
    EarlierOutputs,
    NormStatistics,
    Range,
    RangeCotangents,
    RangeGradient,
    RangeOutputs,
)
from gradbox_engine.ranges.range_on_device import RangeOnDevice, on_host, to_device
from gradbox_engine.replay.checkpoint import JobCheckpoint, Resumed
from gradbox_engine.replay.first_pass import first_pass
from gradbox_engine.replay.gradient_sums import GradientSums
from gradbox_engine.replay.kept_graphs import KeptPass, bytes_beside, places_of
from gradbox_engine.replay.phase_timer import PhaseTimer
from gradbox_engine.replay.retention import NONE_OLDER, GraphBudget, graph_budget
from gradbox_engine.replay.set_gradient import GRADS_ALONE
from gradbox_engine.replay.shard_record import (
    ShardRecord,
    any_changed_state,
    retried_without_kept_graphs,
)
from gradbox_engine.replay.z import ShardRows, concatenated
from gradbox_engine.requests import (
    CallKeywords,
    CallOptions,
    Group,
    Observer,
    Retain,
    Returned,
    Silent,
)

T = TypeVar("T")


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

    The arguments are those of `set_gradient`, and the same on every device of the job.

    Args:
        loss_parameters: names that `wrt` may match besides, those of the objective's parameters.
        retain: of this device.
        observer: told about the shards of each range, counted from its own first.
        checkpoints: where the state of a range is written, and read when it begins again.
        graphs: what earlier jobs kept.
        for_a_later_job: whether `check` hands the graphs of a range to these.

    Raises:
        EngineError: see `errors`.
    """
    every_input = "input_grads" in returns
    selection = select(model, wrt, others=loss_parameters, every_input=every_input)
    registered = places_of(model)
    with prepared(model, groups, selection, CallOptions(**options)) as ready:
        sums_bytes = GradientSums(selection.parameters).expected_bytes()
        overlay_bytes = bytes_beside(registered, model) if for_a_later_job else 0
        budget = graph_budget(
            retain,
            ready.devices,
            sums_bytes=sums_bytes,
            overlay_bytes=overlay_bytes,
            older=graphs.older if for_a_later_job else NONE_OLDER,
        )
        yield HeldJob(
            ready=ready,
            parameters=selection.parameters,
            budget=budget,
            observer=observer or Silent(),
            with_buffers="buffers" in returns,
            checkpoints=checkpoints,
            graphs=graphs,
            for_a_later_job=for_a_later_job,
            overlay_bytes=overlay_bytes,
        )


@dataclass(eq=False)
class HeldJob:
    """The two phases, over any ranges, on a model that stays prepared.

    The other attributes are the arguments of `held_job`; `overlay_bytes` is as in `KeptPass`.
    """

    ready: Prepared
    parameters: Mapping[str, Tensor]  # those that are differentiated
    budget: GraphBudget
    observer: Observer
    with_buffers: bool
    checkpoints: Callable[[Range], Checkpoints]
    graphs: GraphsBetweenJobs
    for_a_later_job: bool
    overlay_bytes: int
    _held: dict[int, RangeOnDevice] = field(default_factory=dict)

    def forward(self, part: Range) -> RangeOutputs:
        """Put the shards of a range through the model, from the registered buffers on.

        Raises:
            CoupledShards: they changed a buffer, and the job has other ranges.
            EngineError: a call failed.
            torch.OutOfMemoryError: one shard does not fit.
        """
        ready, clock = self.ready, PhaseTimer(*self.ready.devices)
        self._held.pop(part.index, None)
        for other in self._held.values():
            if other.kept is None and not self.for_a_later_job:
                other.records[-1].free_graph()  # kept beyond the budget, to be used next
        with clock.timed("forward"):
            checkpoint, sums, resumed = self._resumed(part)
            kept = self._kept_before(part, resumed)
            records = self._freeing_graphs(
                partial(
                    first_pass,
                    ready,
                    self._positions(part),
                    kept.records if kept else resumed.records,
                    budget=self.budget,
                    observer=self.observer,
                    outlives_the_job=self.for_a_later_job,
                    after_shard=checkpoint.after_first_call,
                )
            )
            after = records[-1].after
            norms = {} if part.is_whole else norm_statistics.updates(ready, records)
            joined = partial(
                concatenated, ready.calls.groups, {r.position: r.outputs for r in records}
            )
            whole, num_rows = retried_without_kept_graphs(joined, records, undo=lambda: None)
        held = self._held[part.index] = RangeOnDevice(
            ready, self.parameters, records, num_rows, checkpoint, sums, resumed.second, kept
        )
        with_buffers = self.with_buffers and part.index == 0
        return RangeOutputs(
            outputs={group: on_host(named) for group, named in whole.items()},
            rows={group: tuple(numbers) for group, numbers in num_rows.items()},
            penalties=held.penalties(),
            norms=norms,
            parameters=frozenset(self.parameters),
            stateful=any_changed_state(records),
            seconds=clock.seconds["forward"],
            buffers=on_host(ready.buffers.named(after)) if with_buffers else None,
        )

    def resume(self, part: Range, earlier: EarlierOutputs) -> None:
        """Hold a range whose shards changed no buffer in the job that put them through."""
        positions, state = self._positions(part), self.ready.buffers.first
        rows = ShardRows(self.ready.calls.groups, earlier.rows, positions=positions)
        records = [
            ShardRecord(
                position, to_device(z, self.ready.device), penalties=[], before=state, after=state
            )
            for position, z in rows.parts(earlier.outputs).items()
        ]
        checkpoint, sums, resumed = self._resumed(part)
        kept = self._kept_before(part, resumed)
        self._held[part.index] = RangeOnDevice(
            self.ready,
            self.parameters,
            kept.records if kept else records,
            earlier.rows,
            checkpoint,
            sums,
            resumed.second,
            kept,
        )

    def replay(self, part: Range, cotangents: RangeCotangents) -> RangeGradient:
        """Carry the cotangents back; the device keeps no more of the range.

        The sums of the answer are `NamedSums` on this device.

        Raises:
            CoupledShards: the range's shards depend on the shards before them.
            ReplayMismatch: a shard differs from its first pass by more than its dtype's tolerance.
            EngineError: a call failed, or one has changed the model for good.
            torch.OutOfMemoryError: one shard's graph does not fit.
        """
        clock, held = PhaseTimer(*self.ready.devices), self._held[part.index]

        def undo() -> None:
            held.sums.clear()
            held.second = None

        with clock.timed("replay"), self.ready.changes.refused():
            held.free_unusable(cotangents)
            first = held.records[0]
            in_replay = first.graph is None and compared_by_replay(first, cotangents)
            checked = held.kept is not None  # by the job that kept it
            if not checked and (cotangents.norms or not in_replay):
                self._check_independence(part, held, cotangents.norms)
            replayed = self._freeing_graphs(
                partial(held.replay, cotangents, self.observer), undo=undo
            )
        del self._held[part.index]
        return held.gradient(replayed, seconds=clock.seconds["replay"])

    def _positions(self, part: Range) -> list[Position]:
        return all_positions(self.ready.calls.groups)[part.start : part.stop]

    def _resumed(self, part: Range) -> tuple[JobCheckpoint, GradientSums, Resumed]:
        sums = GradientSums(self.parameters)
        checkpoint = JobCheckpoint(self.checkpoints(part), self.ready, sums)
        return checkpoint, sums, checkpoint.resumed()

    def _kept_before(self, part: Range, resumed: Resumed) -> KeptPass | None:
        """Return what an earlier job kept of a range, unless its replay has begun without that."""
        return None if resumed.second is not None else self.graphs.of(part)

    def check(self, part: Range, norms: Mapping[str, NormStatistics]) -> int:
        """Put the range's first shard through once more; only graphs for a later job are kept.

        Returns:
            How many shards' graphs are kept for a later job.

        Raises:
            CoupledShards: the range's shards depend on the shards before them.
            EngineError: a call failed, or one has changed the model for good.
        """
        with self.ready.changes.refused():
            self._check_independence(part, self._held[part.index], norms)
        held = self._held.pop(part.index)
        if not self.for_a_later_job:
            return 0
        kept = KeptPass(
            held.records,
            frozenset(self.parameters),
            self.ready.inputs,
            held.num_rows,
            self.overlay_bytes,
        )
        if kept.num_kept:
            self.graphs.keep(part, kept)
        return kept.num_kept

    def _check_independence(
        self, part: Range, held: RangeOnDevice, norms: Mapping[str, NormStatistics]
    ) -> None:
        if part.index > 0:
            first = held.records[0]
            updates = norm_statistics.updates(self.ready, [first])
            self._freeing_graphs(partial(check_independence, self.ready, first, norms, updates))

    def _freeing_graphs(
        self, step: Callable[[], T], *, undo: Callable[[], None] = lambda: None
    ) -> T:
        """Run a step; where memory runs out, repeat it without any kept graph of any range."""
        records = [record for held in self._held.values() for record in held.records]
        records += self.graphs.records()
        return retried_without_kept_graphs(step, records, undo=undo)
