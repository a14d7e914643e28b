"""In which order queued jobs run: priority, then fair shares between owners, then age."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable, Mapping

from gradbox_service.jobs import JobRecord


def fair_order(waiting: Iterable[JobRecord], *, held: Mapping[str, int]) -> list[JobRecord]:
    """Order queued jobs.

    A higher priority goes first. Within one priority the next job is that of the owner who holds
    the fewest (running, or placed before it here); between equals, the oldest.

    Args:
        waiting: queued jobs in any order.
        held: how many jobs of each owner run or are next in line already.
    """
    shares = dict(held)
    levels: dict[int, dict[str, deque[JobRecord]]] = {}
    for record in sorted(waiting, key=_age):
        owners = levels.setdefault(record.priority, {})
        owners.setdefault(record.owner, deque()).append(record)
    order: list[JobRecord] = []
    for priority in sorted(levels, reverse=True):
        lines = levels[priority]
        heap = [(shares.get(owner, 0), _age(line[0]), owner) for owner, line in lines.items()]
        heapq.heapify(heap)
        while heap:
            share, _, owner = heapq.heappop(heap)
            line = lines[owner]
            order.append(line.popleft())
            shares[owner] = share + 1
            if line:
                heapq.heappush(heap, (share + 1, _age(line[0]), owner))
    return order


def _age(record: JobRecord) -> tuple[float, str]:
    return (record.created_s, record.id)
