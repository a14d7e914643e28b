"""Job records in Redis.

    gradbox:job:ID             record, JSON
    gradbox:spec:ID            spec, JSON, as it was posted
    gradbox:events:ID          stream of the job's events
    gradbox:lease:ID:ATTEMPT   exists while the attempt's worker beats
    gradbox:owner:NAME         zset of job ids by creation
    gradbox:active             zset of the ids of queued and running jobs by creation
    gradbox:order              zset of queued job ids by position
    gradbox:posted:OWNER:HASH  hash (job, digest) of an idempotency key
    gradbox:changes            stream of job ids, the doorbell for all readers

A change reads under WATCH and writes under MULTI, so a record, its indices, its event and its
lease change together or not at all.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

import redis
from redis.client import Pipeline

from gradbox.protocol import JobSpec, JobState, parse_spec
from gradbox_service.jobs.events import event_of, parse_id, state_event
from gradbox_service.jobs.record import JobRecord, Transition
from gradbox_service.jobs.records import (
    KEY_LIFETIME_S,
    MAX_EVENTS,
    Change,
    Event,
    check_same_spec,
)

ACTIVE = "gradbox:active"
ORDER = "gradbox:order"
CHANGES = "gradbox:changes"
MAX_CHANGES = 10_000
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
        watched = [f"gradbox:job:{record.id}", *([posted] if posted else [])]
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
                    pipe.set(f"gradbox:spec:{record.id}", spec.model_dump_json())
                    pipe.zadd(f"gradbox:owner:{record.owner}", {record.id: record.created_s})
                    _write(pipe, None, record)
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
        return _read(self._redis.get(f"gradbox:job:{job_id}"))

    def spec(self, job_id: str) -> JobSpec | None:
        text = cast(bytes | None, self._redis.get(f"gradbox:spec:{job_id}"))
        return None if text is None else parse_spec(text)

    def owned(
        self, owner: str, *, state: JobState | None = None, limit: int = 100
    ) -> Sequence[JobRecord]:
        found: list[JobRecord] = []
        start = 0
        while len(found) < limit:
            ids = self._redis.zrevrange(f"gradbox:owner:{owner}", start, start + PAGE - 1)
            if not ids:
                break
            start += PAGE
            records = self._many(cast("list[bytes]", ids))
            found += [record for record in records if state in (None, record.state)]
        return found[:limit]

    def owners(self) -> Sequence[str]:
        keys = cast("Iterable[bytes]", self._redis.scan_iter(match="gradbox:owner:*", count=1000))
        return sorted({key.decode().removeprefix("gradbox:owner:") for key in keys})

    def num_active(self, owner: str) -> int:
        return self._redis.zintercard(2, ["gradbox:active", f"gradbox:owner:{owner}"])

    def active(self) -> Sequence[JobRecord]:
        ids = cast("list[bytes]", self._redis.zrange(ACTIVE, 0, -1))
        return [record for record in self._many(ids) if not record.state.final]

    def update(
        self, job_id: str, transition: Transition, *, lease_s: float | None = None
    ) -> JobRecord | None:
        key = f"gradbox:job:{job_id}"
        while True:
            with self._redis.pipeline() as pipe:
                try:
                    _watch(pipe, key)
                    before = _read(pipe.get(key))
                    after = transition(before) if before else None
                    if before is None or after is None:
                        return None
                    pipe.multi()
                    _write(pipe, before, after)
                    if lease_s is not None:
                        _grant(pipe, job_id, after.attempt, lease_s)
                    pipe.execute()
                except redis.WatchError:
                    continue
                return after

    def beat(self, job_id: str, *, attempt: int, lease_s: float) -> JobRecord | None:
        with self._redis.pipeline() as pipe:
            _grant(pipe, job_id, attempt, lease_s)
            pipe.get(f"gradbox:job:{job_id}")
            return _read(pipe.execute()[1])

    def leased(self, job_id: str, *, attempt: int) -> bool:
        return bool(self._redis.exists(_lease_key(job_id, attempt)))

    def events(self, job_id: str, *, after: str | None = None) -> Sequence[Event]:
        first, second = parse_id(after)
        entries = self._redis.xrange(f"gradbox:events:{job_id}", min=f"({first}-{second}")
        return [_event(entry_id, fields) for entry_id, fields in cast("list[_Entry]", entries)]

    def changes(self, after: str | None, *, wait_s: float) -> tuple[str, Sequence[Change]]:
        if after is None:
            newest = cast("list[_Entry]", self._redis.xrevrange(CHANGES, count=1))
            return (newest[0][0].decode() if newest else "0-0"), ()
        answer = self._redis.xread({CHANGES: after}, count=1000, block=max(1, int(wait_s * 1000)))
        if not answer:
            return after, ()
        entries = cast("list[_Entry]", cast(Any, answer)[0][1])
        changes = [
            Change(fields[b"job"].decode(), cast(Any, fields[b"kind"].decode()))
            for _, fields in entries
        ]
        return entries[-1][0].decode(), changes

    def wake(self) -> None:
        with self._redis.pipeline() as pipe:
            _ring(pipe, "", "wake")
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
                    _watch(pipe, *(f"gradbox:job:{job_id}" for job_id in told))
                    records = self._many([job_id.encode() for job_id in told])
                    pipe.multi()
                    _place(pipe, positions, [r for r in records if r.state is JobState.QUEUED])
                    pipe.execute()
                except redis.WatchError:
                    continue
                return

    def positions(self) -> Mapping[str, int]:
        pairs = cast("list[tuple[bytes, float]]", self._redis.zrange(ORDER, 0, -1, withscores=True))
        return {job_id.decode(): int(position) for job_id, position in pairs}

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
        texts = cast(
            "list[bytes | None]", self._redis.mget([f"gradbox:job:{i.decode()}" for i in ids])
        )
        return [JobRecord.from_json(text) for text in texts if text is not None]


_Entry = tuple[bytes, dict[bytes, bytes]]


def _watch(pipe: Pipeline, *keys: str) -> None:
    if keys:
        cast(Any, pipe).watch(*keys)  # redis-py leaves this one method untyped


def _place(pipe: Pipeline, positions: Mapping[str, int], told: Sequence[JobRecord]) -> None:
    pipe.delete(ORDER)
    if positions:
        pipe.zadd(ORDER, dict(positions))
    for record in told:
        _tell(pipe, record.id, state_event(record, queue_position=positions[record.id]))
        _ring(pipe, record.id, "position")


def _write(pipe: Pipeline, before: JobRecord | None, after: JobRecord) -> None:
    pipe.set(f"gradbox:job:{after.id}", after.to_json())
    if after.state.final:
        pipe.zrem(ACTIVE, after.id)
    else:
        pipe.zadd(ACTIVE, {after.id: after.created_s})
    if after.state is not JobState.QUEUED:
        pipe.zrem(ORDER, after.id)
    event = event_of(before, after)
    _tell(pipe, after.id, event)
    _ring(pipe, after.id, event.kind)


def _tell(pipe: Pipeline, job_id: str, event: Event) -> None:
    fields: dict[Any, Any] = {"kind": event.kind, "data": event.data, "final": int(event.final)}
    pipe.xadd(f"gradbox:events:{job_id}", fields, maxlen=MAX_EVENTS, approximate=True)


def _ring(pipe: Pipeline, job_id: str, kind: str) -> None:
    pipe.xadd(CHANGES, {"job": job_id, "kind": kind}, maxlen=MAX_CHANGES, approximate=True)


def _grant(pipe: Pipeline, job_id: str, attempt: int, lease_s: float) -> None:
    pipe.set(_lease_key(job_id, attempt), 1, px=max(1, int(lease_s * 1000)))


def _lease_key(job_id: str, attempt: int) -> str:
    return f"gradbox:lease:{job_id}:{attempt}"


def _posted_key(owner: str, idempotency_key: str) -> str:
    return f"gradbox:posted:{owner}:{hashlib.sha256(idempotency_key.encode()).hexdigest()}"


def _read(text: Any) -> JobRecord | None:
    return None if text is None else JobRecord.from_json(text)


def _event(entry_id: bytes, fields: Mapping[bytes, bytes]) -> Event:
    kind = cast(Any, fields[b"kind"].decode())
    return Event(entry_id.decode(), kind, fields[b"data"].decode(), fields[b"final"] == b"1")
