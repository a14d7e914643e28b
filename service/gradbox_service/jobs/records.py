"""Job records in Redis.

    gradbox:job:ID             record, JSON
    gradbox:spec:ID            spec, JSON, as it was posted
    gradbox:lease:ID:ATTEMPT   exists while the attempt's worker beats
    gradbox:held:NAME          the job and the attempt that the device of worker NAME has in hand
    gradbox:owners             set of the names of all who ever posted a job
    gradbox:owner:NAME         zset of job ids by creation
    gradbox:active:NAME        the same of those that wait or run
    gradbox:STATE:NAME         the same of those that failed, and of those that were cancelled
    gradbox:result-bytes       hash: owner → bytes of their results on disk
    gradbox:charges            list of what attempts cost their owners (see `usage`)
    gradbox:set-aside          hash: job id → bytes that were no record
    gradbox:places             hash: job id → its position in the queue
    gradbox:key:OWNER:HASH     the job and the spec's digest of an idempotency key
    gradbox:changes            stream of changes, each with the record that it left

A change is one script, which runs where the record is still the one that was read: so a record, its
indices, its entry in the stream and its lease change together or not at all.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any, NamedTuple, cast

import redis

from gradbox.errors import IdempotencyConflict
from gradbox.protocol import JobSpec, JobState, parse_spec
from gradbox_service.database.conditional_commands import Beside, ConditionalCommands, Outdated
from gradbox_service.database.owned import OwnedBytes
from gradbox_service.jobs import changes
from gradbox_service.jobs.changes import (
    Change,
    Event,
    active_key,
    job_key,
    owner_key,
    parse_id,
    posted_key,
    spec_key,
)
from gradbox_service.jobs.record import JobRecord, QueuePosition, Transition
from gradbox_service.jobs.turns import Turn, Turns

log = logging.getLogger(__name__)

SET_ASIDE = "gradbox:set-aside"
# An idempotency key is remembered this long.
KEY_LIFETIME_S = 7 * 24 * 3600
CHANGES_READ = 1000
# Of the ids of an owner's jobs, in one command.
PAGE = 200
NEWEST_FIRST: Any = {"end": "-inf", "desc": True, "byscore": True, "withscores": True, "num": PAGE}


class Mark(NamedTuple):
    """A point in a list of jobs that is ordered by creation; it stays good when jobs go."""

    created_s: float
    job_id: str


@dataclass(frozen=True)
class Memory:
    """How much memory a store takes; `bound_bytes` is None for one without a bound."""

    used_bytes: int
    bound_bytes: int | None = None


class Records:
    """The job records of a box, on a Redis of version 7.0 or newer, or a Valkey.

    Every method is safe to call from several processes at once.
    """

    def __init__(self, connection: redis.Redis) -> None:
        self._redis = connection
        # Keeps a connection for `changes`: to take one from the pool costs as much as the command.
        self._reader: redis.Redis | None = None
        self._memory: tuple[float, Memory | None] = (0.0, None)  # when it was read
        self._result_bytes = OwnedBytes(connection, changes.RESULT_BYTES)
        self._creating = ConditionalCommands(connection)
        self._commands = ConditionalCommands(connection, over_bound=True)

    def create(
        self,
        record: JobRecord,
        *,
        spec: JobSpec,
        idempotency_key: str = "",
        turns: Turns | None = None,
        worker: str = "",
        beside: Beside | None = None,
    ) -> JobRecord:
        """Store a queued job, or return the one that its owner posted before under the same key.

        A job that is stored already, under its id, is returned as it is now.

        Args:
            idempotency_key: to be the record's.
            turns: where its turn is fed by the same write, and nothing said of it; None: it waits.
            worker: whose turn it is, see `Turns.push`.
            beside: what else is written where the job is.

        Raises:
            IdempotencyConflict: the key was used with another spec.
            Outdated: what must hold for `beside` does not.
        """
        beside = beside or Beside()
        key = idempotency_key or record.idempotency_key
        record = replace(record, idempotency_key=key, unsaid=turns is not None)
        posted = posted_key(record.owner, key) if key else None
        # Also without a key: if the answer is lost the script is sent again, and by then a worker
        # may have begun the job.
        where: dict[str, bytes | str] = {} if posted else {job_key(record.id): ""}
        while True:
            pipe = self._redis.pipeline()
            if posted:
                job = f"{record.id} {record.spec_digest}"
                pipe.set(posted, job, ex=KEY_LIFETIME_S, nx=posted not in where)
            pipe.set(spec_key(record.id), spec.model_dump_json())
            pipe.sadd(changes.OWNERS, record.owner)
            pipe.zadd(owner_key(record.owner), {record.id: record.created_s})
            changes.write(pipe, None, record)
            beside.write(pipe)
            if turns is not None:
                turns.push(pipe, Turn(record.id, record.attempt + 1), worker=worker)
            if self._creating.run(pipe, where={**where, **beside.where}):
                return record
            if posted:  # read first: its job may be forgotten meanwhile
                where[posted] = cast("bytes | None", self._redis.get(posted)) or b""
            if earlier := self._created(record):
                return earlier
            if beside.where:
                raise Outdated

    def posted(self, owner: str, *, idempotency_key: str, spec_digest: str) -> JobRecord | None:
        """Return the job that `owner` posted under this key, if there is one.

        Raises:
            IdempotencyConflict: the key was used with another spec.
        """
        found = cast("bytes | None", self._redis.get(posted_key(owner, idempotency_key)))
        if found is None:
            return None
        job_id, _, digest = found.decode().partition(" ")
        record = self.get(job_id)
        if record is not None:  # of an earlier version the key outlives a forgotten job
            check_same_spec(idempotency_key, stored=digest, posted=spec_digest)
        return record

    def get(self, job_id: str) -> JobRecord | None:
        """Return the record, or None if there is no such job."""
        return self._read(job_id, cast("bytes | None", self._redis.get(job_key(job_id))))

    def spec(self, job_id: str) -> JobSpec | None:
        """Return what was posted; None if there is no such job, or it failed or was cancelled."""
        return self.with_spec(job_id)[1]

    def with_spec(self, job_id: str) -> tuple[JobRecord | None, JobSpec | None]:
        """Return both the record and the spec, see `get` and `spec`."""
        texts = cast(Any, self._redis.mget(job_key(job_id), spec_key(job_id)))
        return self._read(job_id, texts[0]), None if texts[1] is None else parse_spec(texts[1])

    def many(self, job_ids: Sequence[str]) -> Sequence[JobRecord]:
        """Return the records that there are of these jobs."""
        return self._many([job_id.encode() for job_id in job_ids])

    def active(self) -> Sequence[JobRecord]:
        """Return every queued and running job, oldest first."""
        ids = [job_id.encode() for job_id in self.active_ids()]
        pages = [ids[start : start + CHANGES_READ] for start in range(0, len(ids), CHANGES_READ)]
        return [r for page in pages for r in self._many(page) if not r.state.final]

    def active_ids(self) -> Sequence[str]:
        """Return the ids of every queued and running job, oldest first."""
        with self._redis.pipeline(transaction=False) as pipe:
            for owner in self.owners():
                pipe.zrange(active_key(owner), 0, -1, withscores=True)
            found = [entry for entries in pipe.execute() for entry in entries]
        found.sort(key=lambda entry: (entry[1], entry[0]))
        return [job_id.decode() for job_id, _ in found]

    def update(
        self,
        job_id: str,
        transition: Transition,
        *,
        lease_s: float | None = None,
        holder: str | None = None,
        since: JobRecord | None = None,
        beside: Callable[[JobRecord], Beside] = lambda _: Beside(),
    ) -> JobRecord | None:
        """Apply `transition` to the newest record and append the event, as one transaction.

        A change after the job's end has no event: the final state was the last one.

        Args:
            transition: may be called several times, so it must be pure.
            lease_s: also grant the resulting attempt a lease of this length; used with `begin`.
            holder: also note that the device of this worker has the attempt in hand, while it runs.
            since: the record as last seen, which is read again only if it has changed since.
            beside: returns what else is written with the new record. It is called again where that
                has changed meanwhile, and where it raises, nothing is written.

        Returns:
            The new record; None if there is no such job or the transition does not apply.
        """
        while True:
            text = since.to_json() if since else self._redis.get(job_key(job_id))
            before = since or self._read(job_id, cast("bytes | None", text))
            since, after = None, transition(before) if before else None
            if after is None:
                return None
            pipe = self._redis.pipeline()
            changes.write(pipe, before, after)
            if lease_s is not None:
                changes.grant(pipe, job_id, attempt=after.attempt, lease_s=lease_s)
            if holder is not None:
                changes.hold(pipe, holder, after)
            more = beside(after)
            more.write(pipe)
            where = {job_key(job_id): cast("bytes", text), **more.where}
            if self._commands.run(pipe, where=where):
                return after

    def beat(self, job_id: str, *, attempt: int, lease_s: float) -> JobRecord | None:
        """Renew an attempt's lease, and return the newest record: it says if the job is to stop."""
        pipe = self._redis.pipeline()
        changes.grant(pipe, job_id, attempt=attempt, lease_s=lease_s)
        self._commands.run(pipe, where={})
        return self.get(job_id)

    def leased(self, job_id: str, *, attempt: int) -> bool:
        """Return whether the attempt's lease has not run out."""
        return bool(self._redis.exists(changes.lease_key(job_id, attempt)))

    def events(self, job_id: str, *, after: str | None = None) -> Sequence[Event]:
        """Return a job's events behind the one with id `after`, oldest first, as far as kept.

        Where its states are not kept any more, the present one stands for all.
        """
        record = self.get(job_id)
        if record is None:
            return []
        posted_id = f"{int(record.created_s * 1000)}-0"
        posted = changes.state_event(posted_id, record.as_posted())
        if record.unsaid and not record.state.final:
            now = changes.state_event(f"{posted_id[:-1]}1", record)
            return [event for event in (posted, now) if parse_id(event.id) > parse_id(after)]
        found, newest, whole = self._kept_changes(job_id, after=parse_id(after))
        events = [change.event or changes.state_event(change.id, record) for change in found]
        first = found[0].record if found and found[0].begins else None
        if first and first.state is not JobState.QUEUED and parse_id(posted_id) > parse_id(after):
            return [posted, *events]
        if first or whole or any(event.kind == "state" for event in events):
            return events
        if record.finished_s is None:
            return [changes.state_event(newest, record)]
        ended = changes.state_event(f"{int(record.finished_s * 1000)}-0", record)
        return [ended] if parse_id(ended.id) > parse_id(after) else []

    def _kept_changes(
        self, job_id: str, *, after: tuple[int, int]
    ) -> tuple[list[Change], str, bool]:
        """Read the stream from its end back to a job's first change, or to the id `after`.

        Returns:
            What is about the job, oldest first; the stream's newest id; whether none is missing.
        """
        found: list[Change] = []
        newest = oldest = "0-0"
        page: list[changes.Entry] = []
        while oldest == "0-0" or len(page) == CHANGES_READ:
            until = "+" if oldest == "0-0" else f"({oldest}"
            page = cast(Any, self._redis.xrevrange(changes.CHANGES, max=until, count=CHANGES_READ))
            if not page:
                break
            newest = page[0][0].decode() if oldest == "0-0" else newest
            for entry_id, fields in page:
                oldest = entry_id.decode()
                if parse_id(oldest) <= after:
                    return found[::-1], newest, True
                if fields.get(b"job") == job_id.encode():
                    change = changes.change_in(entry_id, fields)
                    found += [] if change is None else [change]
                    if change is not None and change.begins:
                        return found[::-1], newest, True
        return found[::-1], newest, False

    def changes(self, after: str | None, *, wait_s: float) -> tuple[str, Sequence[Change]]:
        """Wait for changes of any job behind the cursor `after`; None means from now on.

        Returns:
            The next cursor, and the changes; none if `wait_s` went by without one. One of kind
            `missed` comes first if some were trimmed unread.
        """
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
        """End the present wait of everyone in `changes`."""
        pipe = self._redis.pipeline()
        changes.append_change(pipe, "", "wake")
        self._commands.run(pipe, where={})

    def ended(self, *, before_s: float, limit: int) -> Sequence[str]:
        """Return the ids of jobs that ended before a time."""
        found: list[str] = []
        for owner in self.owners():
            for record in self.oldest(owner):
                if record.created_s >= before_s or len(found) == limit:
                    break
                if record.finished_s is not None and record.finished_s < before_s:
                    found.append(record.id)
        return found

    def forget(self, job_id: str) -> None:
        """Remove all that is known of a job that has ended."""
        while True:
            text = cast("bytes | None", self._redis.get(job_key(job_id)))
            record = self._read(job_id, text)
            if record is None or not record.state.final:
                return
            pipe = self._redis.pipeline()
            changes.erase(pipe, record)
            if self._commands.run(pipe, where={job_key(job_id): text or b""}):
                return

    def result_bytes(self) -> Counter[str]:
        """Return what the results of every owner take on disk."""
        return self._result_bytes.totals()

    def memory(self, *, within_s: float = 0.0) -> Memory:
        """Return how much memory the store takes, and may take, or did within these seconds."""
        read_s, memory = self._memory
        if memory is None or time.monotonic() - read_s > within_s:
            found = cast("dict[str, int]", self._redis.info("memory"))
            memory = Memory(found["used_memory"], found.get("maxmemory") or None)
            self._memory = (time.monotonic(), memory)
        return memory

    def owned(
        self,
        owner: str,
        *,
        state: JobState | None = None,
        limit: int = 100,
        after: Mark | None = None,
    ) -> Sequence[JobRecord]:
        """Return an owner's jobs, newest first; only those behind `after` if it is given."""
        key = (state and changes.index_key(owner, state)) or owner_key(owner)
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
        """Give an owner's jobs, oldest first."""
        for start in count(step=PAGE):
            ids = cast("list[bytes]", self._redis.zrange(owner_key(owner), start, start + PAGE - 1))
            if not ids:
                return
            yield from self._many(ids)

    def num_by_owner(self) -> Mapping[str, int]:
        """Return how many jobs everybody has who has any."""
        owners = self.owners()
        with self._redis.pipeline(transaction=False) as pipe:
            for owner in owners:
                pipe.zcard(owner_key(owner))
            found = dict(zip(owners, pipe.execute(), strict=True))
        return {owner: num_jobs for owner, num_jobs in found.items() if num_jobs}

    def owners(self) -> Sequence[str]:
        """Return everybody who ever had a job here, by name."""
        names = cast("set[bytes]", self._redis.smembers(changes.OWNERS))
        return sorted(name.decode() for name in names)

    def num_active(self, owner: str) -> int:
        """Return how many of an owner's jobs are queued or running."""
        return self._redis.zcard(active_key(owner))

    def spec_bytes(self, owner: str) -> int:
        """Return what the specs of an owner's queued and running jobs take."""
        with self._redis.pipeline(transaction=False) as pipe:
            for job_id in cast("list[bytes]", self._redis.zrange(active_key(owner), 0, -1)):
                pipe.strlen(spec_key(job_id.decode()))
            return sum(pipe.execute())

    def set_positions(self, positions: Mapping[str, QueuePosition]) -> None:
        """Store the positions of queued jobs, in place of what was stored."""
        texts: Any = {job_id: found.to_json() for job_id, found in positions.items()}
        with self._redis.pipeline() as pipe:
            pipe.delete(changes.POSITIONS)
            if texts:
                pipe.hset(changes.POSITIONS, mapping=texts)
            pipe.execute()

    def positions(self, job_ids: Sequence[str] | None = None) -> Mapping[str, QueuePosition]:
        """Return the positions that are stored: of these jobs, or all."""
        if job_ids is None:
            found = cast("dict[bytes, bytes]", self._redis.hgetall(changes.POSITIONS))
            return {
                job_id.decode(): QueuePosition.from_json(text) for job_id, text in found.items()
            }
        if not job_ids:
            return {}
        texts = self._redis.hmget(changes.POSITIONS, list(job_ids))
        return _positions(job_ids, cast("list[bytes | None]", texts))

    def _created(self, record: JobRecord) -> JobRecord | None:
        """Return what `record` was stored as before, under its key or under its own id."""
        if record.idempotency_key:
            earlier = self.posted(
                record.owner,
                idempotency_key=record.idempotency_key,
                spec_digest=record.spec_digest,
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
        """Return the record; None, with its bytes set aside, where they are damaged.

        They are not JSON, a field is missing, or a later version of gradbox wrote them. So one bad
        record costs one job, not the loop that read it.
        """
        try:
            return None if text is None else JobRecord.from_json(text)
        except ValueError as error:
            log.error(
                "the record of job %s cannot be read (%s); it is set aside in %s: %r",
                job_id,
                " ".join(str(error).split())[:500],
                SET_ASIDE,
                cast(bytes, text)[:2000],
            )
        pipe = self._redis.pipeline()
        pipe.hset(SET_ASIDE, job_id, cast(Any, text))
        pipe.delete(job_key(job_id), spec_key(job_id))
        for owner in self.owners():
            pipe.zrem(owner_key(owner), job_id)
            pipe.zrem(active_key(owner), job_id)
        self._commands.run(pipe, where={job_key(job_id): cast(bytes, text)})
        return None


def _positions(job_ids: Sequence[str], texts: Sequence[bytes | None]) -> dict[str, QueuePosition]:
    pairs = zip(job_ids, texts, strict=True)
    return {job_id: QueuePosition.from_json(text) for job_id, text in pairs if text is not None}


def check_same_spec(key: str, *, stored: str, posted: str) -> None:
    """Raises:
    IdempotencyConflict: the digests differ.
    """
    if stored != posted:
        raise IdempotencyConflict(
            f"the Idempotency-Key {key!r} came before with another job (spec digest "
            f"{stored[:12]}…, now {posted[:12]}…); send a new key with a new job"
        )
