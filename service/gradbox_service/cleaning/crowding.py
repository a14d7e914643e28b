"""Which records of ended jobs go before their time, because Redis fills up.

Without it a user with a fast loop would fill Redis in hours, and new jobs be refused for everybody
until records are old enough (`admission.shares.check_memory`). Those of whoever has most jobs go,
oldest first: others keep theirs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import islice
from typing import Final

from gradbox_service.jobs import JobRecord, Records

# Of the memory that Redis may take: below what new jobs may fill.
RECORDS_SHARE: Final = 0.6
# That are looked at in one look; the rest waits for the next one.
MAX_RECORDS: Final = 10_000


def crowding(records: Records, *, may_go: Callable[[JobRecord], bool]) -> list[str]:
    """Return the ids of jobs that are to be forgotten, so that Redis takes less than its share.

    Args:
        may_go: tells of a job whether nobody needs it any more.
    """
    memory = records.memory()
    if memory.bound_bytes is None:
        return []
    excess_bytes = memory.used_bytes - RECORDS_SHARE * memory.bound_bytes
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
