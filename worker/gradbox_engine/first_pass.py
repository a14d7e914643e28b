"""The first pass: every shard through the model once, and as many graphs kept as there is room for.

Which graphs are kept decides `retention`; what a shard's graph holds is counted by `saved_tensors`,
and where counting decides nothing, it is left out. Graphs kept uncounted have no copies of buffers,
so they are let go if buffers that they may read turn out to change.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

from torch import Tensor

from gradbox_engine.buffers import Snapshot
from gradbox_engine.calls import Passage
from gradbox_engine.errors import ModelCallFailed
from gradbox_engine.feed import Position
from gradbox_engine.job import Observer
from gradbox_engine.records import Prepared, ShardRecord, with_room
from gradbox_engine.retention import Form, GraphBudget
from gradbox_engine.saved_tensors import SavedTensors, needs_its_own_graph


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
    outliving: bool = False,
) -> FirstPass:
    """Put a range of shards through the model, in order.

    Args:
        before: the buffers at the beginning of the range.
        budget: how much of the graphs may be kept.
        outliving: whether the graphs are for a later job, before which the model is put back.
            Otherwise the last shard's is kept whatever the budget.
    """
    records: list[ShardRecord] = []
    buffers = prepared.buffers
    buffers.restore(before)
    for position, following in pairwise([*positions, None]):
        assert position is not None
        observer.step("forward", len(records), len(positions))
        last = following is None and not outliving
        num_left = 0 if outliving else len(positions) - len(records)
        call = partial(
            _first_call, prepared, position, before, budget, last=last, num_left=num_left
        )

        def start_over(before: Snapshot = before) -> None:
            budget.exhaust()
            buffers.restore(before)

        records.append(with_room(call, records, undo=start_over))
        before = buffers.advance(before)
        prepared.feed.prefetch(following)
    unguarded = [record for record in records if not record.guarded]
    if unguarded and buffers.others_change(before):
        for record in unguarded:
            record.drop()
    observer.step("forward", len(positions), len(positions))
    return FirstPass(records, before)


def _first_call(
    prepared: Prepared,
    position: Position,
    before: Snapshot,
    budget: GraphBudget,
    *,
    last: bool,
    num_left: int,
) -> ShardRecord:
    """Put a shard through for the first time.

    Args:
        num_left: how many shards are to come with this one; 0 if all have to be guarded.
    """
    arguments = prepared.feed.take(position)
    form = _form(prepared.calls.groups[position.group].method, arguments)
    spared = num_left and budget.is_ample(form, num_left) and not prepared.buffers.others_change()
    if form is not None and spared:
        passage = prepared.calls(position, arguments, with_values=True)
        kept, num_bytes = True, budget.count_like(form)
    else:
        passage, saved = _saving_call(prepared, position, arguments, before, budget, last=last)
        if saved is not None and not last:
            budget.count(saved, form)
        kept, num_bytes = (last, 0) if saved is None else (saved.kept, saved.num_bytes)
    outputs = {name: _compact(z) for name, z in passage.outputs.items()}
    record = ShardRecord(position, outputs, passage.penalties, before)
    if kept and passage.intact:
        record.passage, record.num_bytes, record.guarded = passage, num_bytes, not spared
    return record


def _form(method: str, arguments: Mapping[str, Any]) -> Form | None:
    """Return where a shard enters and its shapes, if they are all there is to say of its size."""
    if not all(isinstance(value, Tensor) for value in arguments.values()):
        return None
    return (method, *((name, v.shape, v.dtype) for name, v in arguments.items()))


def _saving_call(
    prepared: Prepared,
    position: Position,
    arguments: dict[str, Any],
    before: Snapshot,
    budget: GraphBudget,
    *,
    last: bool,
) -> tuple[Passage, SavedTensors | None]:
    """Call the model with its saved tensors under control, or without where it cannot bear that."""
    if not budget.unmeasured:
        saved = SavedTensors(
            limit_bytes=math.inf if last else budget.room_bytes(),
            parameters=prepared.parameter_storages,
            buffers=prepared.buffers.storages(),
        )
        try:
            with saved.saving():
                return prepared.calls(position, arguments, with_values=True), saved
        except ModelCallFailed as error:
            if not needs_its_own_graph(error.__cause__):
                raise
        budget.unmeasured = True
    # The model differentiates in its own forward pass, so its graph has to be whole.
    prepared.buffers.restore(before)
    arguments = prepared.feed.take(position)
    return prepared.calls(position, arguments, with_values=True), None


def _compact(z: Tensor) -> Tensor:
    """Return z's values without its graph, nor the larger tensor that it may be a view of."""
    z = z.detach()
    return z if z.untyped_storage().nbytes() == z.nbytes else z.clone()
