"""Job records in Redis.

    gradbox:job:ID             record, JSON
    gradbox:spec:ID            spec, JSON, as it was posted
    gradbox:events:ID          stream of the job's events
    gradbox:lease:ID:ATTEMPT   exists while the attempt's worker beats
    gradbox:owner:NAME         zset of job ids by creation
    gradbox:active             zset of the ids of queued and running jobs by creation
    gradbox:ended              zset of the ids of all others by the time of their end
    gradbox:result-bytes       hash: owner → bytes of their results on disk
    gradbox:usage:HOUR         hash: what each owner used (see `usage`)
    gradbox:busy:MINUTE        hash: worker → milliseconds in which it held a job
    gradbox:set-aside          hash: job id → bytes that were no record (see `damaged`)
    gradbox:order              zset of queued job ids by position
    gradbox:posted:OWNER:HASH  hash (job, digest) of an idempotency key
    gradbox:changes            stream of job ids, the doorbell for all readers

A change reads under WATCH and writes under MULTI, so a record, its indices, its event and its
lease change together or not at all.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, cast

import redis
from redis.client import Pipeline

from gradbox.protocol import JobSpec, JobState, parse_spec
from gradbox_service.jobs import redis_changes as changes
from gradbox_service.jobs.damaged import SET_ASIDE, failed_record, read_record
from gradbox_service.jobs.events import parse_id
from gradbox_service.jobs.record import JobRecord, Transition
from gradbox_service.jobs.records import (
    KEY_LIFETIME_S,
    Change,
    Event,
    Memory,
    check_same_spec,
)
from gradbox_service.jobs.redis_changes import job_key, owner_key, spec_key

# Positions further back than this are stored, but nobody is told when they change.
MAX_TOLD = 200
PAGE = 200


class RedisRecords:
    """Implements `Records` on a Redis of version 7.0 or newer, or a Valkey."""

    def __init__(self, connection: redis.Redis) -> None:
        self._redis = connection

    def create(
        self, record: JobRecord, *, spec: JobSpec, idempotency_key: str | None = None
    ) -> JobRecord:
        posted = _posted_key(record.owner, idempotency_key) if idempotency_key else None
        # The job's own key is watched even though nobody else knows the id: redis-py sends a
        # transaction that watches nothing again when its answer is lost, and by then a worker
        # may have begun the job.
        watched = [job_key(record.id), *([posted] if posted else [])]
        while True:
            with self._redis.pipeline() as pipe:
                try:
                    _watch(pipe, *watched)
                    earlier = self._created(record, idempotency_key)
                    if earlier:
                        return earlier
                    pipe.multi()
                    if posted:
                        pipe.hset(posted, mapping={"job": record.id, "digest": record.spec_digest})
                        pipe.expire(posted, KEY_LIFETIME_S)
                    pipe.set(spec_key(record.id), spec.model_dump_json())
                    pipe.zadd(owner_key(record.owner), {record.id: record.created_s})
                    changes.write(pipe, None, record)
                    pipe.execute()
                except redis.WatchError:
                    continue
                return record

    def posted(self, owner: str, *, idempotency_key: str, spec_digest: str) -> JobRecord | None:
        found = cast(dict[bytes, bytes], self._redis.hgetall(_posted_key(owner, idempotency_key)))
        if not found:
            return None
        check_same_spec(idempotency_key, stored=found[b"digest"].decode(), posted=spec_digest)
        return self.get(found[b"job"].decode())

    def get(self, job_id: str) -> JobRecord | None:
        return self._read(job_id, cast("bytes | None", self._redis.get(job_key(job_id))))

    def spec(self, job_id: str) -> JobSpec | None:
        text = cast(bytes | None, self._redis.get(spec_key(job_id)))
        return None if text is None else parse_spec(text)

    def owned(
        self, owner: str, *, state: JobState | None = None, limit: int = 100
    ) -> Sequence[JobRecord]:
        found: list[JobRecord] = []
        start = 0
        while len(found) < limit:
            ids = self._redis.zrevrange(owner_key(owner), start, start + PAGE - 1)
            if not ids:
                break
            start += PAGE
            records = self._many(cast("list[bytes]", ids))
            found += [record for record in records if state in (None, record.state)]
        return found[:limit]

    def owners(self) -> Sequence[str]:
        keys = cast("Iterable[bytes]", self._redis.scan_iter(match=owner_key("*"), count=1000))
        return sorted({key.decode().removeprefix(owner_key("")) for key in keys})

    def num_active(self, owner: str) -> int:
        return self._redis.zintercard(2, [changes.ACTIVE, owner_key(owner)])

    def active(self) -> Sequence[JobRecord]:
        ids = cast("list[bytes]", self._redis.zrange(changes.ACTIVE, 0, -1))
        return [record for record in self._many(ids) if not record.state.final]

    def update(
        self, job_id: str, transition: Transition, *, lease_s: float | None = None
    ) -> JobRecord | None:
        key = job_key(job_id)
        while True:
            with self._redis.pipeline() as pipe:
                try:
                    _watch(pipe, key)
                    before = read_record(cast("bytes | None", pipe.get(key)))
                    after = transition(before) if before else None
                    if before is None or after is None:
                        return None
                    pipe.multi()
                    changes.write(pipe, before, after)
                    if lease_s is not None:
                        changes.grant(pipe, job_id, attempt=after.attempt, lease_s=lease_s)
                    pipe.execute()
                except redis.WatchError:
                    continue
                except ValueError:
                    self.get(job_id)  # which sets the damaged record aside
                    continue
                return after

    def beat(self, job_id: str, *, attempt: int, lease_s: float) -> JobRecord | None:
        with self._redis.pipeline() as pipe:
            changes.grant(pipe, job_id, attempt=attempt, lease_s=lease_s)
            pipe.get(job_key(job_id))
            return self._read(job_id, pipe.execute()[1])

    def leased(self, job_id: str, *, attempt: int) -> bool:
        return bool(self._redis.exists(changes.lease_key(job_id, attempt)))

    def events(self, job_id: str, *, after: str | None = None) -> Sequence[Event]:
        first, second = parse_id(after)
        entries = self._redis.xrange(changes.events_key(job_id), min=f"({first}-{second}")
        found = [changes.event_in(*entry) for entry in cast("list[changes.Entry]", entries)]
        return [event for event in found if event is not None]

    def changes(self, after: str | None, *, wait_s: float) -> tuple[str, Sequence[Change]]:
        if after is None:
            newest = cast("list[changes.Entry]", self._redis.xrevrange(changes.CHANGES, count=1))
            return (newest[0][0].decode() if newest else "0-0"), ()
        answer = self._redis.xread(
            {changes.CHANGES: after}, count=1000, block=max(1, int(wait_s * 1000))
        )
        if not answer:
            return after, ()
        entries = cast("list[changes.Entry]", cast(Any, answer)[0][1])
        found = [changes.change_in(*entry) for entry in entries]
        return entries[-1][0].decode(), [change for change in found if change is not None]

    def wake(self) -> None:
        with self._redis.pipeline() as pipe:
            changes.ring(pipe, "", "wake")
            pipe.execute()

    def place(self, order: Sequence[str]) -> None:
        before = self.positions()
        positions = {job_id: position for position, job_id in enumerate(order, start=1)}
        told = [job_id for job_id in order[:MAX_TOLD] if before.get(job_id) != positions[job_id]]
        if not told and len(before) == len(order):
            return
        while True:
            with self._redis.pipeline() as pipe:
                try:
                    # A job that begins in between must not be said to wait.
                    _watch(pipe, *(job_key(job_id) for job_id in told))
                    records = self._many([job_id.encode() for job_id in told])
                    pipe.multi()
                    changes.place(
                        pipe, positions, [r for r in records if r.state is JobState.QUEUED]
                    )
                    pipe.execute()
                except redis.WatchError:
                    continue
                return

    def positions(self) -> Mapping[str, int]:
        pairs = cast(
            "list[tuple[bytes, float]]", self._redis.zrange(changes.ORDER, 0, -1, withscores=True)
        )
        return {job_id.decode(): int(position) for job_id, position in pairs}

    def ended(self, *, before_s: float, limit: int) -> Sequence[str]:
        ids = self._redis.zrangebyscore(changes.ENDED, "-inf", f"({before_s}", start=0, num=limit)
        return [job_id.decode() for job_id in cast("list[bytes]", ids)]

    def forget(self, job_id: str) -> None:
        while True:
            with self._redis.pipeline() as pipe:
                try:
                    _watch(pipe, job_key(job_id))
                    record = self.get(job_id)
                    pipe.multi()
                    if record is None:
                        pipe.zrem(changes.ENDED, job_id)
                    elif record.state.final:
                        changes.erase(pipe, record)
                    pipe.execute()
                except redis.WatchError:
                    continue
                return

    def result_bytes(self) -> Mapping[str, int]:
        found = cast("dict[bytes, bytes]", self._redis.hgetall(changes.RESULT_BYTES))
        return {owner.decode(): int(size) for owner, size in found.items() if int(size)}

    def memory(self) -> Memory:
        found = cast("dict[str, int]", self._redis.info("memory"))
        return Memory(found["used_memory"], found.get("maxmemory") or None)

    def ping(self) -> None:
        self._redis.ping()

    def _created(self, record: JobRecord, idempotency_key: str | None) -> JobRecord | None:
        """Return what `record` was stored as before, under its key or under its own id."""
        if idempotency_key:
            earlier = self.posted(
                record.owner, idempotency_key=idempotency_key, spec_digest=record.spec_digest
            )
            if earlier:
                return earlier
        return self.get(record.id)

    def _many(self, ids: list[bytes]) -> list[JobRecord]:
        if not ids:
            return []
        texts = cast("list[bytes | None]", self._redis.mget([job_key(i.decode()) for i in ids]))
        records = [self._read(i.decode(), text) for i, text in zip(ids, texts, strict=True)]
        return [record for record in records if record is not None]

    def _read(self, job_id: str, text: bytes | None) -> JobRecord | None:
        """Return the record; a damaged one is set aside, and its job failed."""
        try:
            return read_record(text)
        except ValueError as error:
            return self._fail_damaged(job_id, error)

    def _fail_damaged(self, job_id: str, reason: ValueError) -> JobRecord | None:
        owner = self._owner_of(job_id)
        while True:
            with self._redis.pipeline() as pipe:
                try:
                    _watch(pipe, job_key(job_id))
                    text = cast("bytes | None", pipe.get(job_key(job_id)))
                    with suppress(ValueError):
                        return read_record(text)  # another process was faster
                    assert text is not None
                    record = failed_record(
                        job_id, text, reason=reason, owner=owner, now_s=time.time()
                    )
                    pipe.multi()
                    pipe.hset(SET_ASIDE, job_id, cast(Any, text))
                    changes.write(pipe, None, record)
                    pipe.execute()
                except redis.WatchError:
                    continue
                return record

    def _owner_of(self, job_id: str) -> str | None:
        """Look the job up in the owners' indices, for its record does not tell."""
        owners = self.owners()
        return next((o for o in owners if self._redis.zscore(owner_key(o), job_id)), None)


def _watch(pipe: Pipeline, *keys: str) -> None:
    if keys:
        cast(Any, pipe).watch(*keys)  # redis-py leaves this one method untyped


def _posted_key(owner: str, idempotency_key: str) -> str:
    return f"gradbox:posted:{owner}:{hashlib.sha256(idempotency_key.encode()).hexdigest()}"
