"""Job records in Redis.

    gradbox:job:ID             record, JSON
    gradbox:spec:ID            spec, JSON, as it was posted
    gradbox:events:ID          stream of the job's events
    gradbox:lease:ID:ATTEMPT   exists while the attempt's worker beats
    gradbox:owners             set of the names of all who ever posted a job
    gradbox:owner:NAME         zset of job ids by creation
    gradbox:active:NAME        the same of those that wait or run
    gradbox:STATE:NAME         the same of those in one final state
    gradbox:active             zset of the ids of queued and running jobs by creation
    gradbox:ended              zset of the ids of all others by the time of their end
    gradbox:result-bytes       hash: owner → bytes of their results on disk
    gradbox:usage:HOUR         hash: what each owner used (see `usage`)
    gradbox:busy:MINUTE        hash: worker → milliseconds in which it held a job
    gradbox:set-aside          hash: job id → bytes that were no record (see `damaged`)
    gradbox:places             hash: job id → where it stands, for the first and the followed
    gradbox:followed           zset of the ids of followed jobs by when that ends
    gradbox:key:OWNER:HASH     the job and the spec's digest of an idempotency key
    gradbox:posted             hash: job id → the key above that it was posted with
    gradbox:changes            stream of changes, each with the record that it left

A change is one script, which runs where the record is still the one that was read: so a record, its
indices, its event and its lease change together or not at all.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, cast

import redis

from gradbox.protocol import JobSpec, parse_spec
from gradbox_service.database.conditional_commands import ConditionalCommands
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
from gradbox_service.jobs.redis_changes import job_key, owner_key, posted_key, spec_key
from gradbox_service.jobs.redis_lists import RedisLists
from gradbox_service.jobs.redis_places import RedisPlaces

CHANGES_READ = 1000


class RedisRecords(RedisLists, RedisPlaces):
    """Implements `Records` on a Redis of version 7.0 or newer, or a Valkey."""

    def __init__(self, connection: redis.Redis) -> None:
        self._redis = connection
        # Keeps a connection for `changes`: to take one from the pool costs as much as the command.
        self._reader: redis.Redis | None = None
        self._creating = ConditionalCommands(connection)
        self._commands = ConditionalCommands(connection, over_bound=True)

    def create(
        self, record: JobRecord, *, spec: JobSpec, idempotency_key: str | None = None
    ) -> JobRecord:
        posted = posted_key(record.owner, idempotency_key) if idempotency_key else None
        # Also without a key: if the answer is lost the script is sent again, and by then a worker
        # may have begun the job.
        where: dict[str, bytes | str] = {posted or job_key(record.id): ""}
        while True:
            pipe = self._redis.pipeline()
            if posted:
                pipe.set(posted, f"{record.id} {record.spec_digest}", ex=KEY_LIFETIME_S)
                pipe.hset(changes.POSTED, record.id, posted)
            pipe.set(spec_key(record.id), spec.model_dump_json())
            pipe.sadd(changes.OWNERS, record.owner)
            pipe.zadd(owner_key(record.owner), {record.id: record.created_s})
            changes.write(pipe, None, record)
            if self._creating.run(pipe, where=where):
                return record
            if posted:  # read first: its job may be forgotten meanwhile
                where[posted] = cast("bytes | None", self._redis.get(posted)) or b""
            if earlier := self._created(record, idempotency_key):
                return earlier

    def posted(self, owner: str, *, idempotency_key: str, spec_digest: str) -> JobRecord | None:
        found = cast("bytes | None", self._redis.get(posted_key(owner, idempotency_key)))
        if found is None:
            return None
        job_id, _, digest = found.decode().partition(" ")
        record = self.get(job_id)
        if record is not None:  # of an earlier version the key outlives a forgotten job
            check_same_spec(idempotency_key, stored=digest, posted=spec_digest)
        return record

    def get(self, job_id: str) -> JobRecord | None:
        return self._read(job_id, cast("bytes | None", self._redis.get(job_key(job_id))))

    def spec(self, job_id: str) -> JobSpec | None:
        text = cast(bytes | None, self._redis.get(spec_key(job_id)))
        return parse_spec(text) if text is not None else None

    def many(self, job_ids: Sequence[str]) -> Sequence[JobRecord]:
        return self._many([job_id.encode() for job_id in job_ids])

    def active(self) -> Sequence[JobRecord]:
        ids = cast("list[bytes]", self._redis.zrange(changes.ACTIVE, 0, -1))
        pages = [ids[start : start + CHANGES_READ] for start in range(0, len(ids), CHANGES_READ)]
        return [r for page in pages for r in self._many(page) if not r.state.final]

    def active_ids(self) -> Sequence[str]:
        ids = cast("list[bytes]", self._redis.zrange(changes.ACTIVE, 0, -1))
        return [job_id.decode() for job_id in ids]

    def update(
        self,
        job_id: str,
        transition: Transition,
        *,
        lease_s: float | None = None,
    ) -> JobRecord | None:
        while True:
            text = cast("bytes | None", self._redis.get(job_key(job_id)))
            before = self._read(job_id, text)
            after = transition(before) if before else None
            if after is None:
                return None
            pipe = self._redis.pipeline()
            changes.write(pipe, before, after)
            if lease_s is not None:
                changes.grant(pipe, job_id, attempt=after.attempt, lease_s=lease_s)
            if self._commands.run(pipe, where={job_key(job_id): text or b""}):
                return after

    def beat(self, job_id: str, *, attempt: int, lease_s: float) -> JobRecord | None:
        pipe = self._redis.pipeline()
        changes.grant(pipe, job_id, attempt=attempt, lease_s=lease_s)
        self._commands.run(pipe, where={})
        return self.get(job_id)

    def leased(self, job_id: str, *, attempt: int) -> bool:
        return bool(self._redis.exists(changes.lease_key(job_id, attempt)))

    def events(self, job_id: str, *, after: str | None = None) -> Sequence[Event]:
        first, second = parse_id(after)
        entries = self._redis.xrange(changes.events_key(job_id), min=f"({first}-{second}")
        found = cast("list[changes.Entry]", entries)
        return [event for entry in found if (event := changes.event_in(*entry))]

    def changes(self, after: str | None, *, wait_s: float) -> tuple[str, Sequence[Change]]:
        self._reader = reader = self._reader or cast(redis.Redis, cast(Any, self._redis).client())
        if after is None:
            newest = cast("list[changes.Entry]", self._redis.xrevrange(changes.CHANGES, count=1))
            return (newest[0][0].decode() if newest else "0-0"), ()
        block = None if wait_s <= 0 else max(1, int(wait_s * 1000))
        answer = cast(Any, reader.xread({changes.CHANGES: after}, count=CHANGES_READ, block=block))
        if not answer:
            return after, ()
        entries: list[changes.Entry] = answer[0][1]
        read = [change for entry in entries if (change := changes.change_in(*entry))]
        if len(entries) == CHANGES_READ and changes.trimmed(self._redis, after):
            read.insert(0, Change("", "missed"))
        return entries[-1][0].decode(), read

    def wake(self) -> None:
        pipe = self._redis.pipeline()
        changes.ring(pipe, "", "wake")
        self._commands.run(pipe, where={})

    def ended(self, *, before_s: float, limit: int) -> Sequence[str]:
        ids = self._redis.zrangebyscore(changes.ENDED, "-inf", f"({before_s}", start=0, num=limit)
        return [job_id.decode() for job_id in cast("list[bytes]", ids)]

    def forget(self, job_id: str) -> None:
        while True:
            text = cast("bytes | None", self._redis.get(job_key(job_id)))
            record = self._read(job_id, text)
            pipe = self._redis.pipeline()
            if record is None:
                pipe.zrem(changes.ENDED, job_id)
            elif record.state.final:
                posted = cast("bytes | None", self._redis.hget(changes.POSTED, job_id))
                changes.erase(pipe, record, posted=posted)
            if self._commands.run(pipe, where={job_key(job_id): text or b""}):
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

    def _many(self, ids: Sequence[bytes]) -> list[JobRecord]:
        if not ids:
            return []
        texts = cast(Any, self._redis.mget([job_key(i.decode()) for i in ids]))
        return [r for r in map(self._read, (i.decode() for i in ids), texts) if r is not None]

    def _read(self, job_id: str, text: bytes | None) -> JobRecord | None:
        """Return the record; a damaged one is set aside, and its job failed."""
        try:
            return read_record(text)
        except ValueError as error:
            return self._fail_damaged(job_id, error)

    def _fail_damaged(self, job_id: str, reason: ValueError) -> JobRecord | None:
        owner = self._owner_of(job_id)
        while True:
            text = cast("bytes | None", self._redis.get(job_key(job_id)))
            with suppress(ValueError):
                return read_record(text)  # another process was faster
            assert text is not None
            record = failed_record(job_id, text, reason=reason, owner=owner, now_s=time.time())
            pipe = self._redis.pipeline()
            pipe.hset(SET_ASIDE, job_id, cast(Any, text))
            changes.write(pipe, None, record)
            if self._commands.run(pipe, where={job_key(job_id): text}):
                return record

    def _owner_of(self, job_id: str) -> str | None:
        """Look the job up in the owners' indices, for its record does not tell."""
        owners = self.owners()
        return next((o for o in owners if self._redis.zscore(owner_key(o), job_id)), None)
