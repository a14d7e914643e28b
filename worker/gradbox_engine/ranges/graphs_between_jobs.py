"""Graphs of a range that wait on its device for the gradient job at their cotangents."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from gradbox_engine.ranges.protocol import Range
from gradbox_engine.replay.kept_graphs import KeptPass
from gradbox_engine.replay.retention import NONE_OLDER, OlderGraphs
from gradbox_engine.replay.shard_record import ShardRecord


@dataclass(frozen=True)
class GraphsBetweenJobs:
    """The graphs that lie on a device from one job to the next, as a held job sees them.

    Attributes:
        of: returns the first pass of a range that an earlier job kept, or None.
        keep: is given that of a range whose graphs are to wait for a later job.
        older: graphs of earlier jobs, freed where the budget has no room for new ones.
        records: returns all records whose graphs are there.
    """

    of: Callable[[Range], KeptPass | None]
    keep: Callable[[Range, KeptPass], None]
    older: OlderGraphs
    records: Callable[[], Sequence[ShardRecord]]


NONE_BETWEEN_JOBS: Final = GraphsBetweenJobs(
    of=lambda _: None, keep=lambda *_: None, older=NONE_OLDER, records=lambda: ()
)
