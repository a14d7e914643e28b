"""A job on one device, held open between its two phases.

The model stays prepared and the graphs that the budget has room for stay in memory from `forward`
of a range to its `replay`. Random streams belong to a shard's number in the whole job, so it does
not matter on which device, or in which range, a shard runs. Groups are therefore those of the whole
job. Shards outside of a device's ranges may hold tensors on torch's `meta` device: of them, only
names, dtypes and sizes are ever read.

Several ranges may be held on one device. They share its budget, and each begins with the registered
buffers. All calls come from the thread that opened the job.

What is done with a shard is in `Passes`, which each computation has of its own. Where memory runs
out, a phase frees all kept graphs and goes on, a first pass behind the last shard that it did;
where there were none, it has the shard recomputed that did not fit, see `calling.recompute`.

A forward job may leave its ranges' graphs on the device, where a gradient job at their cotangents
finds them in place of a first pass. A range whose graphs are gone is replayed.

A range has a checkpoint of its own: whoever takes it up again, here or on another device, goes on
behind the last shard that is in it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final, Protocol, TypeVar

import torch
from torch import Tensor

from gradbox_engine.checkpoint import Checkpoint, Checkpoints
from gradbox_engine.model.calling.outputs import Outputs
from gradbox_engine.model.calling.shard_feed import Position, all_positions
from gradbox_engine.model.precision import accumulation_dtype
from gradbox_engine.model.prepared import Prepared
from gradbox_engine.ranges import norm_statistics
from gradbox_engine.ranges.independence import check_independence, compared_by_replay
from gradbox_engine.ranges.protocol import (
    EarlierOutputs,
    GradientForm,
    NamedSums,
    NormStatistics,
    Range,
    RangeCotangents,
    RangeGradient,
    RangeOutputs,
)
from gradbox_engine.replay.checkpoint import JobCheckpoint, SecondPass, Sums
from gradbox_engine.replay.first_pass import FirstCall, first_pass
from gradbox_engine.replay.kept_graphs import KeptPass
from gradbox_engine.replay.phase_timer import PhaseTimer
from gradbox_engine.replay.retention import NONE_OLDER, OlderGraphs
from gradbox_engine.replay.shard_record import (
    ShardRecord,
    any_changed_state,
    free_graphs,
    retried_in_less_memory,
)
from gradbox_engine.replay.z import NumRows, ShardRows
from gradbox_engine.requests import Observer

T = TypeVar("T")


class RangeSums(Sums, Protocol):
    """What a range's gradients are added to."""

    def reached(self) -> NamedSums:
        """Return the sums that a gradient was added to, in the parameters' order."""

    def clear(self) -> None:
        """Forget what was added."""


@dataclass
class HeldRange:
    """What a device keeps of a range between its two phases.

    `sums` and `second` are the sums and the progress of a second phase that was interrupted. `kept`
    is there if an earlier job put the range through, and left its graphs.
    """

    records: list[ShardRecord]
    checkpoint: JobCheckpoint
    sums: RangeSums
    second: Checkpoint | None
    kept: KeptPass | None
    num_rows: NumRows = field(default_factory=dict)

    def begin_again(self) -> None:
        """Forget what the second phase has done so far."""
        self.sums.clear()
        self.second = None


class Passes(Protocol):
    """What a computation does with the shards of a range."""

    @property
    def ready(self) -> Prepared:
        """The model, prepared for the whole job."""

    @property
    def observer(self) -> Observer:
        """Who is told about the shards of each range, counted from its own first."""

    @property
    def parameters(self) -> Mapping[str, Tensor]:
        """What is differentiated, by name."""

    def sums(self) -> RangeSums:
        """Return sums of nothing yet."""

    def first_call(self, num_shards: int) -> FirstCall:
        """Return what puts the shards of a range, so many, through the model for the first time."""

    def joined(self, records: Sequence[ShardRecord]) -> tuple[dict[str, Outputs], NumRows]:
        """Return the range's rows of Z, and each shard's number of them."""

    def second_pass(
        self, held: HeldRange, needed: Mapping[Position, Outputs], asked: RangeCotangents
    ) -> SecondPass:
        """Add the gradients of the shards that need it to `held.sums`.

        Args:
            needed: their cotangents, on the device.
            asked: what they came in.
        """

    def keep_no_graphs(self) -> None:
        """Keep no graph from here on."""

    def compared(self, outputs: Outputs) -> Outputs:
        """Return what is compared of outputs where a shard is put through again."""

    def first_compared(self, record: ShardRecord) -> Outputs:
        """Return the same of a shard's first pass."""


@dataclass(frozen=True)
class GraphsBetweenJobs:
    """The graphs that lie on a device from one job to the next, as a held job sees them.

    Attributes:
        of: returns the first pass of a range that an earlier job kept, or None.
        keep: is given that of a range whose graphs are to wait for a later job.
        older: graphs of earlier jobs, freed where the budget has no room for new ones.
        records: returns all records whose graphs are there.
    """

    of: Callable[[Range], KeptPass | None] = lambda _: None
    keep: Callable[[Range, KeptPass], None] = lambda *_: None
    older: OlderGraphs = NONE_OLDER
    records: Callable[[], Sequence[ShardRecord]] = lambda: ()


NONE_BETWEEN_JOBS: Final = GraphsBetweenJobs()


@dataclass(eq=False)
class HeldJob:
    """The two phases, over any ranges, on a model that stays prepared.

    Attributes:
        with_buffers: whether the buffers after the first range are asked for.
        checkpoints: where the state of a range is written, and read when it begins again.
        graphs: what earlier jobs kept.
        for_a_later_job: whether `check` hands the graphs of a range to these.
        overlay_bytes: as in `KeptPass`.
    """

    passes: Passes
    checkpoints: Callable[[Range], Checkpoints]
    with_buffers: bool = False
    graphs: GraphsBetweenJobs = NONE_BETWEEN_JOBS
    for_a_later_job: bool = False
    overlay_bytes: int = 0
    _held: dict[int, HeldRange] = field(default_factory=dict)

    @property
    def device(self) -> torch.device:
        """Where Z is."""
        return self.passes.ready.device

    def forward(self, part: Range) -> RangeOutputs:
        """Put the shards of a range through the model, from the registered buffers on.

        Raises:
            CoupledShards: they changed a buffer, and the job has other ranges.
            EngineError: a call failed.
            torch.OutOfMemoryError: one shard does not fit.
        """
        passes, ready = self.passes, self.passes.ready
        clock = PhaseTimer(*ready.devices)
        self._held.pop(part.index, None)
        for other in self._held.values():
            if other.kept is None and not self.for_a_later_job:
                other.records[-1].free_graph()  # kept beyond the budget, to be used next
        with clock.timed("forward"):
            held = self._begun(part)
            positions, records = self._positions(part), held.records
            first = partial(
                first_pass,
                ready,
                positions,
                records,
                passes.first_call(len(positions) - len(records)),
                observer=passes.observer,
                after_shard=held.checkpoint.after_first_call,
            )
            self.freeing_graphs(first, undo=passes.keep_no_graphs)
            norms = {} if part.is_whole else norm_statistics.updates(ready, records)
            whole, held.num_rows = self.freeing_graphs(partial(passes.joined, records))
        penalties = [value.double() for record in records for value in record.penalties]
        after = records[-1].after
        with_buffers = self.with_buffers and part.index == 0
        return RangeOutputs(
            outputs=whole,
            rows={group: tuple(numbers) for group, numbers in held.num_rows.items()},
            penalties=torch.stack(penalties) if penalties else torch.zeros(0).double(),
            norms=norms,
            seconds=clock.seconds["forward"],
            buffers=ready.buffers.named(after) if with_buffers else None,
            stateful=self._lacks_state or (self.for_a_later_job and any_changed_state(records)),
            changed_attributes=after.beyond.names if after.beyond else (),
        )

    def resume(self, part: Range, earlier: EarlierOutputs) -> None:
        """Hold a range whose shards changed no buffer in the job that put them through."""
        ready = self.passes.ready
        held = self._begun(part)
        held.num_rows = earlier.rows
        if held.kept is None and held.second is None:
            state, positions = ready.buffers.first, self._positions(part)
            rows = ShardRows(ready.calls.groups, earlier.rows, positions=positions)
            held.records = [
                ShardRecord(position, z, penalties=[], before=state, after=state)
                for position, z in rows.parts(_moved(earlier.outputs, ready.device)).items()
            ]

    def replay(self, part: Range, cotangents: RangeCotangents) -> RangeGradient:
        """Carry the cotangents back; the device keeps no more of the range.

        The sums of the answer are `NamedSums` on this device.

        Raises:
            CoupledShards: the range's shards depend on the shards before them.
            ReplayMismatch: a shard differs from its first pass by more than its dtype's tolerance.
            EngineError: a call failed, or one has changed the model for good.
            torch.OutOfMemoryError: one shard's graph does not fit.
        """
        ready, held = self.passes.ready, self._held[part.index]
        clock = PhaseTimer(*ready.devices)
        with clock.timed("replay"), ready.changes.refused():
            needed = self._needed(held, cotangents)
            first = held.records[0]
            in_replay = first.graph is None and compared_by_replay(first, cotangents)
            checked = held.kept is not None  # by the job that kept it
            if not checked and (cotangents.norms or not in_replay):
                self._check_independence(part, held, cotangents.norms)
            done = self.freeing_graphs(
                lambda: self.passes.second_pass(held, needed, cotangents), undo=held.begin_again
            )
        del self._held[part.index]
        recomputation = ready.calls.recomputation
        return RangeGradient(
            sums=held.sums.reached(),
            parameters={
                name: GradientForm(tuple(p.shape), accumulation_dtype(p.dtype))
                for name, p in self.passes.parameters.items()
            },
            inputs={group: tuple(names) for group, names in ready.inputs.items()},
            input_grads=done.input_grads,
            retained=done.num_retained,
            replayed=done.num_replayed,
            replay_difference=max(done.difference, recomputation.difference()),
            recomputed=recomputation.done(record.position for record in held.records),
            fallbacks=done.fallbacks,
            seconds=clock.seconds["replay"],
        )

    def check(self, part: Range, norms: Mapping[str, NormStatistics]) -> int:
        """Put the range's first shard through once more; only graphs for a later job are kept.

        Returns:
            How many shards' graphs are kept for a later job.

        Raises:
            CoupledShards: the range's shards depend on the shards before them.
            EngineError: a call failed, or one has changed the model for good.
        """
        ready = self.passes.ready
        with ready.changes.refused():
            self._check_independence(part, self._held[part.index], norms)
        held = self._held.pop(part.index)
        if not self.for_a_later_job:
            return 0
        kept = KeptPass(
            held.records,
            frozenset(self.passes.parameters),
            ready.inputs,
            held.num_rows,
            self.overlay_bytes,
        )
        some = kept.num_kept < len(held.records)
        if ready.buffers.beyond.in_order or (self._lacks_state and some):
            kept.free()  # a second half would replay some shards without what those before left
        if kept.num_kept:
            self.graphs.keep(part, kept)
        return kept.num_kept

    @property
    def _lacks_state(self) -> bool:
        """Whether the model holds something between shards that no snapshot has."""
        beyond = self.passes.ready.buffers.beyond
        return beyond.in_order or beyond.lacks_counts or beyond.lacks_fillings

    def _positions(self, part: Range) -> list[Position]:
        return all_positions(self.passes.ready.calls.groups)[part.start : part.stop]

    def _begun(self, part: Range) -> HeldRange:
        """Hold a range, with the records that a checkpoint or an earlier job has of it."""
        sums = self.passes.sums()
        checkpoint = JobCheckpoint(
            self.checkpoints(part), self.passes.ready, sums, compared=self.passes.compared
        )
        resumed = checkpoint.resumed()
        # A second phase that has begun without the graphs of an earlier job goes on without them.
        kept = self.graphs.of(part) if resumed.second is None else None
        records = kept.records if kept else resumed.records
        held = HeldRange(records, checkpoint, sums, resumed.second, kept)
        self._held[part.index] = held
        return held

    def _needed(self, held: HeldRange, cotangents: RangeCotangents) -> dict[Position, Outputs]:
        """Return the cotangents of the shards that need a backward pass, and free other graphs."""
        ready = self.passes.ready
        rows = ShardRows(
            ready.calls.groups, held.num_rows, positions=[r.position for r in held.records]
        )
        parts = rows.parts(_moved(cotangents.cotangents, ready.device))
        needed = {position: parts[position] for position in cotangents.needed}
        if held.kept is None:
            free_graphs(held.records, parts.keys() - needed.keys())
        else:  # those without cotangents wait for later ones
            given = {position for position, part in parts.items() if part}
            parameters = frozenset(self.passes.parameters)
            held.kept.usable_for(given, parameters=parameters, inputs=ready.inputs)
            free_graphs(held.records, given - needed.keys())
        return needed

    def _check_independence(
        self, part: Range, held: HeldRange, norms: Mapping[str, NormStatistics]
    ) -> None:
        if part.index > 0:
            ready, first = self.passes.ready, held.records[0]
            check = partial(
                check_independence,
                ready,
                first,
                norms,
                norm_statistics.updates(ready, [first]),
                expected=self.passes.first_compared(first),
                compared=self.passes.compared,
            )
            self.freeing_graphs(check)

    def freeing_graphs(
        self, step: Callable[[], T], *, undo: Callable[[], None] = lambda: None
    ) -> T:
        """Run a step; where memory runs out, repeat it without any kept graph of any range.

        Where there is none, the shard that did not fit is recomputed, if the job leaves that open.
        """

        def records() -> list[ShardRecord]:
            held = [record for held in self._held.values() for record in held.records]
            return [*held, *self.graphs.records()]

        recompute = self.passes.ready.calls.recomputation.after_out_of_memory
        return retried_in_less_memory(step, records, recompute=recompute, undo=undo)


def _moved(whole: Mapping[str, Outputs], device: torch.device) -> dict[str, Outputs]:
    return {
        group: {name: tensor.to(device) for name, tensor in named.items()}
        for group, named in whole.items()
    }
