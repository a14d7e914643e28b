"""Which stored files go, by age, then by the room on the disk, by number; and whose records.

A file's modification time is its last use: its bytes never change, and whoever uses it sets the
time. Nothing here touches a disk.

What was used within the last hour makes no room, for its job may be about to be posted, or its
result about to be read; of blobs and results that were read it is a quarter of an hour. A loop that
trains a model writes more than that meanwhile, and would fill the disk for everybody: what it
leaves behind goes first, at once (`needed.spent`).

Records of ended jobs go before their time where Redis fills up (`crowding`). Without it a user with
a fast loop would fill Redis in hours, and new jobs be refused for everybody until records are old
enough. Those of whoever has most jobs go, oldest first: others keep theirs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final, Literal

from gradbox_service.jobs import JobRecord, Records

SPARED_S: Final = 3600.0
SETTLED_SPARED_S: Final = 900.0
# Of the memory that Redis may take: below what new jobs may fill.
RECORDS_FRACTION: Final = 0.6
# That are looked at in one look; the rest waits for the next one.
MAX_RECORDS: Final = 10_000


@dataclass(frozen=True)
class Stored:
    """One file.

    Attributes:
        name: a result's job id, or a blob's digest.
        owners: against whom it counts; empty where that does not matter or nobody is known.
        used_s: when it was last used, in seconds since 1970.
        settled: whether it can be sent or computed again and nobody waits to read it: a blob, or a
            result that was read.
    """

    kind: Literal["result", "blob"]
    name: str
    owners: Sequence[str]
    size_bytes: int
    used_s: float
    settled: bool = False

    @property
    def due_s(self) -> float:
        """When the file may make room for others."""
        return self.used_s + (SETTLED_SPARED_S if self.settled else SPARED_S)


@dataclass(frozen=True)
class Limits:
    """What may stay.

    Attributes:
        total_bytes: what all files may take together.
        num_blobs: how many blobs may stay, however small.
    """

    result_age_s: float
    blob_age_s: float
    total_bytes: float
    num_blobs: float = math.inf


def expired(
    files: Iterable[Stored], limits: Limits, *, needed: Collection[str], now_s: float
) -> list[Stored]:
    """Return the files that are to go, least recently used first.

    Args:
        needed: names of files that jobs still read; they count, and stay.
    """
    oldest_first = sorted(files, key=lambda file: file.used_s)
    ages = {"result": limits.result_age_s, "blob": limits.blob_age_s}
    free = [file for file in oldest_first if file.name not in needed]
    gone = {file for file in free if now_s - file.used_s > ages[file.kind]}
    left = [file for file in oldest_first if file not in gone]
    excess_bytes = sum(file.size_bytes for file in left) - limits.total_bytes
    excess_blobs = sum(file.kind == "blob" for file in left) - limits.num_blobs
    for file in free:
        if file in gone or file.due_s > now_s:
            continue
        if excess_bytes > 0 or (excess_blobs > 0 and file.kind == "blob"):
            gone.add(file)
            excess_bytes -= file.size_bytes
            excess_blobs -= file.kind == "blob"
    return [file for file in oldest_first if file in gone]


def crowding(records: Records, *, may_go: Callable[[JobRecord], bool]) -> list[str]:
    """Return the ids of jobs that are to be forgotten, so that Redis takes less than its share.

    Args:
        may_go: returns of a job whether nobody needs it any more.
    """
    memory = records.memory()
    if memory.bound_bytes is None:
        return []
    excess_bytes = memory.used_bytes - RECORDS_FRACTION * memory.bound_bytes
    if excess_bytes <= 0:
        return []
    num_jobs = records.num_by_owner()
    if not num_jobs:
        return []
    bytes_a_job = memory.used_bytes / sum(num_jobs.values())
    most = max(num_jobs, key=lambda owner: (num_jobs[owner], owner))
    looked_at = islice(records.oldest(most), MAX_RECORDS)
    free = (record.id for record in looked_at if may_go(record))
    return list(islice(free, math.ceil(excess_bytes / bytes_a_job)))
