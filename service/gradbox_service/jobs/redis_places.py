"""Where queued jobs stand, in Redis, and who asked to be told: a part of `RedisRecords`."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from typing import cast

import redis
from redis.client import Pipeline

from gradbox.protocol import JobState
from gradbox_service.database.refusals import store_refuses
from gradbox_service.jobs import redis_changes as changes
from gradbox_service.jobs.place import Place
from gradbox_service.jobs.record import JobRecord
from gradbox_service.jobs.records import FOLLOWED_S
from gradbox_service.jobs.redis_changes import job_key


class RedisPlaces(ABC):
    """The methods of `Records` about places."""

    _redis: redis.Redis

    @abstractmethod
    def many(self, job_ids: Sequence[str]) -> Sequence[JobRecord]: ...

    def follow(self, job_ids: Sequence[str], *, for_s: float = FOLLOWED_S) -> Mapping[str, Place]:
        if not job_ids:
            return {}
        with self._redis.pipeline(transaction=False) as pipe:
            pipe.zadd(changes.FOLLOWED, dict.fromkeys(job_ids, time.time() + for_s))
            pipe.hmget(changes.PLACES, list(job_ids))
            noted, found = pipe.execute(raise_on_error=False)
        # Where Redis takes no change there is none to be told of.
        if isinstance(noted, redis.RedisError) and not store_refuses(noted):
            raise noted
        if isinstance(found, redis.RedisError):
            raise found
        return _places(job_ids, found)

    def followed(self) -> Collection[str]:
        with self._redis.pipeline() as pipe:
            pipe.zremrangebyscore(changes.FOLLOWED, "-inf", time.time())
            pipe.zrange(changes.FOLLOWED, 0, -1)
            return {job_id.decode() for job_id in cast("list[bytes]", pipe.execute()[1])}

    def place(self, places: Mapping[str, Place], *, told: Collection[str] = ()) -> None:
        def store(pipe: Pipeline) -> None:
            records = self.many(list(told))
            pipe.multi()
            changes.place(pipe, places, [r for r in records if r.state is JobState.QUEUED])

        # A job that begins in between must not be said to wait.
        self._redis.transaction(store, *map(job_key, told))

    def places(self, job_ids: Sequence[str] | None = None) -> Mapping[str, Place]:
        if job_ids is None:
            found = cast("dict[bytes, bytes]", self._redis.hgetall(changes.PLACES))
            return {job_id.decode(): Place.from_json(text) for job_id, text in found.items()}
        if not job_ids:
            return {}
        texts = self._redis.hmget(changes.PLACES, list(job_ids))
        return _places(job_ids, cast("list[bytes | None]", texts))


def _places(job_ids: Sequence[str], texts: Sequence[bytes | None]) -> dict[str, Place]:
    pairs = zip(job_ids, texts, strict=True)
    return {job_id: Place.from_json(text) for job_id, text in pairs if text is not None}
