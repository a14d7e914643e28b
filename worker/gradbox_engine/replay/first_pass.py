"""The first pass: every shard through the model once, and as many graphs kept as there is room for.

Which graphs are kept decides `retention`; what a shard's graph holds is counted by `saved_tensors`,
and where counting decides nothing, it is left out. Graphs kept uncounted have no copies of buffers,
so they are let go if buffers that they may read turn out to change. Statistics of batch norms do
change; they are put back before a graph is used.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

from torch import Tensor

from gradbox_engine.errors import BadOutput, ModelCallFailed
from gradbox_engine.model.calls import Passage
from gradbox_engine.model.outputs import Outputs
from gradbox_engine.model.shard_feed import Position
from gradbox_engine.model.snapshots import Snapshot
from gradbox_engine.replay.chunks import Chunks
from gradbox_engine.replay.comparison import same_bits
from gradbox_engine.replay.retention import Form, GraphBudget
from gradbox_engine.replay.saved_tensors import SavedTensors, needs_its_own_graph
from gradbox_engine.replay.shard_record import Prepared, ShardRecord, with_room
from gradbox_engine.replay.ungraphed import GraphMissed
from gradbox_engine.requests import Observer


@dataclass(frozen=True)
class FirstPass:
    """The records of a range of shards, and the buffers after the last of them."""

    records: list[ShardRecord]
    after: Snapshot


class SnapshotMissing(Exception):
    """The buffers have to be put back to where a shard began, and no record has them."""


def forward(
    prepared: Prepared,
    positions: Sequence[Position],
    *,
    before: Snapshot,
    budget: GraphBudget,
    observer: Observer,
    outliving: bool = False,
) -> FirstPass:
    """Put a range of shards through the model, in order.

    The buffers before a shard are noted, but where nothing changes other than statistics of batch
    norms, for the first shard of the range alone. With penalties they are noted for all.

    Args:
        before: the buffers at the beginning of the range.
        budget: how much of the graphs may be kept.
        outliving: whether the graphs are for a later job, before which the model is put back.
            Otherwise the last shard's is kept whatever the budget.

    Raises:
        GraphMissed: a shard did not bear to go without a graph, see `ungraphed`.
    """
    run = partial(_Run, prepared, positions, budget, observer, outliving=outliving)
    if not prepared.calls.has_penalties:
        try:
            return run(snapshots=False).forward(before)
        except SnapshotMissing:
            budget.release()
    return run(snapshots=True).forward(before)


class _Run:
    """One way over a range of shards."""

    def __init__(
        self,
        prepared: Prepared,
        positions: Sequence[Position],
        budget: GraphBudget,
        observer: Observer,
        *,
        outliving: bool,
        snapshots: bool,
    ) -> None:
        self._prepared = prepared
        self._positions = positions
        self._budget = budget
        self._observer = observer
        self._outliving = outliving
        self._snapshots = snapshots
        self._chunks = Chunks(Counter(position.group for position in positions))
        self._records: list[ShardRecord] = []
        self._before: Snapshot | None = None
        self._latest = prepared.buffers.first

    def forward(self, first: Snapshot) -> FirstPass:
        """Put the shards through.

        Raises:
            SnapshotMissing: snapshots that were left out turn out to be needed.
        """
        buffers, num_shards = self._prepared.buffers, len(self._positions)
        buffers.restore(first)
        self._before = self._latest = first
        for position, following in pairwise([*self._positions, None]):
            assert position is not None
            self._observer.step("forward", len(self._records), num_shards)
            last = following is None and not self._outliving
            call = partial(self._first_call, position, last=last)
            self._records.append(with_room(call, self._records, undo=self._start_over))
            if not self._snapshots and buffers.settled():
                self._before = None if buffers.has_statistics else self._latest
            else:
                self._before = self._latest = buffers.advance(self._latest)
                if buffers.others_change() and not self._snapshots:
                    self._need_snapshots()
            self._note_end(self._records[-1])
            self._prepared.feed.prefetch(following)
        graphless = not all(record.graphed for record in self._records)
        if graphless and self._prepared.preserved.rebound():
            raise GraphMissed
        after = self._snapshot()
        self._settle(after)
        self._observer.step("forward", num_shards, num_shards)
        return FirstPass(self._records, after)

    def _settle(self, after: Snapshot) -> None:
        """Now that it is known which buffers change, let go of what that makes wrong or needless.

        A kept graph without copies of buffers is wrong where they change; ends of shards are
        needless where they do not.
        """
        kept = [record for record in self._records if record.kept]
        if not kept and not self._budget.has_measured:
            return
        if self._prepared.buffers.others_change(after):
            for record in kept:
                if not record.guarded:
                    record.drop()
            return
        self._budget.remember()
        for record in kept:
            record.ended = None

    def _note_end(self, newest: ShardRecord) -> None:
        """Note the buffers as the newest shard's graph is to find them."""
        if newest.kept:
            newest.ended = self._before
            if self._prepared.buffers.has_statistics:
                newest.after = self._prepared.buffers.statistics()

    def _need_snapshots(self) -> None:
        """From the first shard on that changes more than statistics, all need one."""
        if any(record.before is None for record in self._records):
            raise SnapshotMissing
        self._snapshots = True

    def _snapshot(self) -> Snapshot:
        return self._prepared.buffers.take(self._latest) if self._before is None else self._before

    def _start_over(self) -> None:
        """Get ready for a shard once more, with nothing kept from here on."""
        self._budget.exhaust()
        self._put_back()

    def _put_back(self) -> None:
        if self._before is None:
            raise SnapshotMissing
        self._prepared.buffers.restore(self._before)

    def _first_call(self, position: Position, *, last: bool) -> ShardRecord:
        prepared, budget = self._prepared, self._budget
        arguments = prepared.feed.take(position)
        form = _form(prepared.calls.groups[position.group].method, arguments)
        num_left = len(self._positions) - len(self._records)
        if not self._outliving and not prepared.buffers.others_change():
            ample = form if budget.is_ample(form, num_left) else None
            if ample is not None or (last and self._records):
                passage = prepared.calls(position, arguments, with_values=True)
                num_bytes = 0 if ample is None else budget.count_like(ample)
                return self._record(
                    position, passage, kept=True, num_bytes=num_bytes, guarded=False
                )
        replayed = not (last or self._outliving or prepared.calls.has_penalties)
        if replayed and not budget.unmeasured and not budget.room_bytes():
            if prepared.ungraphed.allowed(form):
                return self._without_graph(position, arguments)
            if form is not None and prepared.ungraphed.to_be_tried(form, num_left):
                return self._both_ways(position, arguments, form)
        return self._with_graph(position, arguments, form, last=last)

    def _without_graph(self, position: Position, arguments: dict[str, Any]) -> ShardRecord:
        try:
            passage = self._prepared.calls(position, arguments, graph=False)
        except (ModelCallFailed, BadOutput) as error:
            raise GraphMissed from error
        return self._record(position, passage, graphed=False)

    def _both_ways(self, position: Position, arguments: dict[str, Any], form: Form) -> ShardRecord:
        """Put a shard through without a graph, and then as if that had not been."""
        prepared = self._prepared
        before = self._snapshot()
        trial: tuple[Outputs, Snapshot] | None = None
        with suppress(ModelCallFailed, BadOutput):
            passage = prepared.calls(position, arguments, graph=False)
            outputs = {name: z.clone() for name, z in passage.outputs.items()}
            trial = outputs, prepared.buffers.take(before)
        if prepared.preserved.rebound():
            raise GraphMissed
        prepared.buffers.restore(before)
        record = self._with_graph(position, prepared.feed.take(position), form, last=False)
        same = (
            trial is not None
            and same_bits(trial[0], record.outputs)
            and trial[1].same_bits(prepared.buffers.take(before))
        )
        prepared.ungraphed.tried(form, same=same)
        return record

    def _with_graph(
        self, position: Position, arguments: dict[str, Any], form: Form | None, *, last: bool
    ) -> ShardRecord:
        passage, saved = self._saving_call(position, arguments, last=last)
        if saved is None:
            return self._record(position, passage, kept=last)
        if not last:
            self._budget.count(saved, form)
        return self._record(position, passage, kept=saved.kept, num_bytes=saved.num_bytes)

    def _record(
        self,
        position: Position,
        passage: Passage,
        *,
        kept: bool = False,
        num_bytes: int = 0,
        guarded: bool = True,
        graphed: bool = True,
    ) -> ShardRecord:
        outputs = self._chunks.write(position.group, passage.outputs)
        record = ShardRecord(position, outputs, passage.penalties, self._before, graphed=graphed)
        if kept and passage.intact:
            record.passage, record.num_bytes, record.guarded = passage, num_bytes, guarded
        return record

    def _saving_call(
        self, position: Position, arguments: dict[str, Any], *, last: bool
    ) -> tuple[Passage, SavedTensors | None]:
        """Call the model with its saved tensors under control, or without if it can't bear that."""
        prepared, budget = self._prepared, self._budget
        if not budget.unmeasured:
            saved = SavedTensors(
                limit_bytes=math.inf if last else budget.room_bytes(),
                parameters=prepared.parameter_storages,
                buffers=prepared.buffers.storages(statistics=self._outliving),
            )
            try:
                with saved.saving():
                    return prepared.calls(position, arguments, with_values=True), saved
            except ModelCallFailed as error:
                if not needs_its_own_graph(error.__cause__):
                    raise
            budget.unmeasured = True
        # The model differentiates in its own forward pass, so its graph has to be whole.
        self._put_back()
        arguments = prepared.feed.take(position)
        return prepared.calls(position, arguments, with_values=True), None


def _form(method: str, arguments: Mapping[str, Any]) -> Form | None:
    """Return where a shard enters and its shapes, if they are all there is to say of its size."""
    if not all(isinstance(value, Tensor) for value in arguments.values()):
        return None
    return (method, *((name, v.shape, v.dtype) for name, v in arguments.items()))
