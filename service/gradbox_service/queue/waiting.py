"""The queued jobs in the order in which they run.

A higher priority goes first. Within one priority the next job is that of the owner who used least
(`Shares.key`), as if each job before it had already taken the time that it is expected to take;
between equals, and among the jobs of one owner, the oldest goes first.

To add or to remove a job, or to move an owner, costs O(log N).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from sortedcontainers import SortedList

from gradbox_service.jobs import JobRecord

# When a job was created, and its id.
Age = tuple[float, str]


@dataclass
class _Level:
    """The jobs of one priority: by owner in order of age, and the owners in order of use."""

    lines: dict[str, SortedList] = field(default_factory=dict)
    owners: SortedList = field(default_factory=SortedList)  # of (key, age of the first, owner)
    listed: dict[str, tuple[float, Age, str]] = field(default_factory=dict)  # what `owners` holds

    def list(self, owner: str, key: float) -> None:
        """Put an owner in its place among the others, or out if no job of it is left."""
        entry = self.listed.pop(owner, None)
        if entry is not None:
            self.owners.remove(entry)
        line = self.lines.get(owner)
        if line:
            self.listed[owner] = entry = (key, line[0], owner)
            self.owners.add(entry)
        else:
            self.lines.pop(owner, None)


class Waiting:
    """Queued jobs that no turn was fed for."""

    def __init__(self, key: Callable[[str], float]) -> None:
        """Hold no job yet.

        Args:
            key: of an owner; less goes first. `move` has to be called when it changed.
        """
        self._key = key
        self.records: dict[str, JobRecord] = {}  # by id
        self._levels: dict[int, _Level] = {}

    def __len__(self) -> int:
        return len(self.records)

    def clear(self) -> None:
        """Hold no job any more."""
        self.records.clear()
        self._levels.clear()

    def add(self, record: JobRecord) -> None:
        """Add a job, in place of the record of it that is here."""
        self.remove(record.id)
        self.records[record.id] = record
        level = self._levels.setdefault(record.priority, _Level())
        level.lines.setdefault(record.owner, SortedList()).add(_age(record))
        level.list(record.owner, self._key(record.owner))

    def remove(self, job_id: str) -> None:
        """Remove a job if it is here."""
        record = self.records.pop(job_id, None)
        if record is None:
            return
        level = self._levels[record.priority]
        level.lines[record.owner].remove(_age(record))
        level.list(record.owner, self._key(record.owner))
        if not level.lines:
            del self._levels[record.priority]

    def move(self, owner: str) -> None:
        """Put an owner's jobs where the owner's key says."""
        for level in self._levels.values():
            if owner in level.lines:
                level.list(owner, self._key(owner))

    def move_all(self) -> None:
        """Put every owner's jobs where its key says."""
        for owner in {owner for level in self._levels.values() for owner in level.lines}:
            self.move(owner)

    def ranked(self, cost: Callable[[JobRecord], float]) -> Iterator[JobRecord]:
        """Yield the jobs in order; the first k take O(k log N). They must not change meanwhile.

        Args:
            cost: what a job adds to its owner's key.
        """
        spent: dict[str, float] = {}
        for priority in sorted(self._levels, reverse=True):
            level = self._levels[priority]
            unopened = iter(level.owners)
            following = next(unopened, None)
            heap: list[tuple[float, Age, str, Iterator[Age]]] = []
            while heap or following is not None:
                if following is not None and (not heap or following <= heap[0][:3]):
                    key, first, owner = following
                    line = iter(level.lines[owner])
                    next(line)
                    heapq.heappush(heap, (key + spent.get(owner, 0.0), first, owner, line))
                    following = next(unopened, None)
                    continue
                key, age, owner, line = heap[0]
                record = self.records[age[1]]
                yield record
                more = cost(record)
                spent[owner] = spent.get(owner, 0.0) + more
                after = next(line, None)
                if after is None:
                    heapq.heappop(heap)
                else:
                    heapq.heapreplace(heap, (key + more, after, owner, line))


def _age(record: JobRecord) -> Age:
    return (record.created_s, record.id)
