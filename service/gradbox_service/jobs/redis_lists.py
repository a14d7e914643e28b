"""Whose jobs there are, in Redis: a part of `RedisRecords`."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from typing import Any, cast

import redis

from gradbox.protocol import JobState
from gradbox_service.jobs import redis_changes as changes
from gradbox_service.jobs.record import JobRecord
from gradbox_service.jobs.records import Mark
from gradbox_service.jobs.redis_changes import owner_key, spec_key

PAGE = 200
NEWEST_FIRST: Any = {"end": "-inf", "desc": True, "byscore": True, "withscores": True, "num": PAGE}


class RedisLists(ABC):
    """The methods of `Records` about an owner's jobs."""

    _redis: redis.Redis

    @abstractmethod
    def _many(self, ids: Sequence[bytes]) -> list[JobRecord]: ...

    def owned(
        self,
        owner: str,
        *,
        state: JobState | None = None,
        limit: int = 100,
        after: Mark | None = None,
    ) -> Sequence[JobRecord]:
        key = owner_key(owner) if state is None else changes.index_key(owner, state)
        found: dict[str, JobRecord] = {}
        newest, start, ids = math.inf if after is None else after.created_s, 0, [b""] * PAGE
        while len(found) < limit and len(ids) == PAGE:
            page: Any = self._redis.zrange(key, cast(Any, newest), offset=start, **NEWEST_FIRST)
            ids = [job_id for job_id, _ in page]
            for record in self._many(ids):
                behind = after is None or (record.created_s, record.id) < after
                if behind and state in (None, record.state):
                    found.setdefault(record.id, record)
            # By time and not by number: jobs that come or go meanwhile move all behind them.
            last_s = page[-1][1] if page else newest
            newest, start = (last_s, 0) if last_s < newest else (newest, start + PAGE)
        return list(found.values())[:limit]

    def oldest(self, owner: str) -> Iterator[JobRecord]:
        for start in count(step=PAGE):
            ids = cast("list[bytes]", self._redis.zrange(owner_key(owner), start, start + PAGE - 1))
            if not ids:
                return
            yield from self._many(ids)

    def num_by_owner(self) -> Mapping[str, int]:
        owners = self.owners()
        with self._redis.pipeline(transaction=False) as pipe:
            for owner in owners:
                pipe.zcard(owner_key(owner))
            found = dict(zip(owners, pipe.execute(), strict=True))
        return {owner: num_jobs for owner, num_jobs in found.items() if num_jobs}

    def owners(self) -> Sequence[str]:
        names = cast("set[bytes]", self._redis.smembers(changes.OWNERS))
        return sorted(name.decode() for name in names)

    def num_active(self, owner: str) -> int:
        return self._redis.zcard(changes.index_key(owner, JobState.QUEUED))

    def spec_bytes(self, owner: str) -> int:
        key = changes.index_key(owner, JobState.QUEUED)
        with self._redis.pipeline(transaction=False) as pipe:
            for job_id in cast("list[bytes]", self._redis.zrange(key, 0, -1)):
                pipe.strlen(spec_key(job_id.decode()))
            return sum(pipe.execute())
