"""Use by owner over a day, a week or a month, in buckets of whole hours that end with this one.

Beside it is what each of them keeps on the box now.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from typing import Final

from gradbox.protocol import JobState, OwnerUsage, Period, UsageView
from gradbox_service.accounting.usage import HOUR_S, Used
from gradbox_service.backing import Backing
from gradbox_service.identity.tokens import TokenInfo
from gradbox_service.jobs.charges import with_running

# Hours a bucket, and buckets.
BUCKETS: Final[Mapping[Period, tuple[int, int]]] = {
    "day": (1, 24),
    "week": (6, 28),
    "month": (24, 30),
}


def usage_seen_by(caller: TokenInfo, box: Backing, span: Period) -> UsageView:
    """Return what was used, by owner for the box's owner; for others, theirs and all the rest's."""
    now_s = time.time()
    hours, num_buckets = BUCKETS[span]
    last = int(now_s // HOUR_S)
    first = last - hours * num_buckets + 1
    running = [r for r in box.records.active() if r.state is JobState.RUNNING]
    used = with_running(box.usage.by_hour(first, last), running, now_s=now_s)

    def shown(owner: str) -> str | None:
        return owner if caller.admin or owner == caller.name else None

    buckets: dict[str | None, list[Used]] = {}
    for hour, owners in used.items():
        for owner, more in owners.items():
            index = (hour - first) // hours
            if index >= 0:
                line = buckets.setdefault(shown(owner), [Used()] * num_buckets)
                line[index] += more
    kept: Counter[str | None] = Counter()
    for sizes in box.taken().values():
        for owner, size_bytes in sizes.items():
            kept[shown(owner)] += size_bytes
    lines = [
        _line(owner, buckets.get(owner, [Used()] * num_buckets), kept_bytes=kept[owner])
        for owner in buckets.keys() | (+kept).keys()
    ]
    return UsageView(
        span=span,
        begins_s=first * HOUR_S,
        bucket_s=hours * HOUR_S,
        owners=sorted(lines, key=lambda line: (line.owner is None, -line.device_s, line.owner)),
    )


def _line(owner: str | None, buckets: list[Used], *, kept_bytes: int) -> OwnerUsage:
    total = sum(buckets, Used())
    return OwnerUsage(
        owner=owner,
        device_s=total.device_ms / 1000,
        result_bytes=total.result_bytes,
        num_jobs=total.num_jobs,
        kept_bytes=kept_bytes,
        device_s_by_bucket=[used.device_ms / 1000 for used in buckets],
        result_bytes_by_bucket=[used.result_bytes for used in buckets],
    )
