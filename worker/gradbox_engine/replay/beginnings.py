"""The buffers as they were when a shard began, for its replay.

Where the first pass took a snapshot, that is put back. Where it left it out, nothing changes from
shard to shard but statistics of batch norms, and those are what the shards before leave behind: the
replay of the shard before, mostly. Shards that are not replayed, for want of a cotangent, then run
once more without a backward pass, from the last beginning that is known.
"""

from __future__ import annotations

from collections.abc import Sequence

from gradbox_engine.model.shard_feed import all_positions
from gradbox_engine.replay.shard_record import Prepared, ShardRecord


class Beginnings:
    """Puts the buffers where a shard began."""

    def __init__(self, prepared: Prepared, records: Sequence[ShardRecord]) -> None:
        self._prepared = prepared
        self._records = {record.position: record for record in records}
        self._positions = all_positions(prepared.calls.groups)
        self._places = {position: place for place, position in enumerate(self._positions)}
        begun = (record.before for record in records if record.before is not None)
        self._others = next(begun, prepared.buffers.first)  # the same before all that have none
        self._reached: int | None = None  # the shard before which the buffers stand

    def put_back(self, record: ShardRecord) -> None:
        """Put the buffers where this shard's replay begins; it is to run next."""
        place = self._places[record.position]
        if record.before is not None:
            self._prepared.buffers.restore(record.before)
        elif self._reached != place:
            self._go_to(place)
        self._reached = place + 1

    def use_graph(self, record: ShardRecord) -> None:
        """Put the buffers where this shard ended, for its graph may read them."""
        if record.ended is not None:
            self._prepared.buffers.restore(record.ended)
        elif record.after is not None:
            self._prepared.buffers.put_statistics(record.after)
        else:
            return
        self._reached = self._places[record.position] + 1

    def _go_to(self, place: int) -> None:
        start = next(start for start in range(place, -1, -1) if self._put_if_known(start))
        for position in self._positions[start:place]:
            self._prepared.calls(position, self._prepared.feed.take(position))

    def _put_if_known(self, place: int) -> bool:
        """Put the buffers where a shard began, if that is known, and return whether it is."""
        buffers, records, positions = self._prepared.buffers, self._records, self._positions
        if place == self._reached:
            return True
        record = records.get(positions[place])
        if record is not None and record.before is not None:
            buffers.restore(record.before)
            return True
        if place == 0:
            buffers.restore(buffers.first)
            return True
        before = records.get(positions[place - 1])
        if before is None or before.after is None:
            return False
        buffers.restore(self._others)
        buffers.put_statistics(before.after)
        return True
