"""The in-memory twin of `RedisRecords`: for tests, and for a box inside one process."""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace

from gradbox.protocol import JobSpec, JobState
from gradbox_service.accounting.usage import MemoryUsage
from gradbox_service.jobs.charges import charge_of
from gradbox_service.jobs.events import event_of, parse_id, state_event
from gradbox_service.jobs.place import Place
from gradbox_service.jobs.record import JobRecord, Transition
from gradbox_service.jobs.records import (
    FOLLOWED_S,
    MAX_EVENTS,
    Change,
    Event,
    Mark,
    Memory,
    check_same_spec,
)


class MemoryRecords:
    """Implements `Records` in one process. `usage` is what ended attempts were charged."""

    def __init__(self) -> None:
        self.usage = MemoryUsage()
        self._records: dict[str, JobRecord] = {}
        self._specs: dict[str, JobSpec] = {}
        self._posted: dict[tuple[str, str], tuple[str, str]] = {}
        self._events: dict[str, deque[Event]] = {}
        self._leases: dict[tuple[str, int], float] = {}
        self._places: dict[str, Place] = {}
        self._followed: dict[str, float] = {}
        self._changes: list[Change] = []
        self._ticks = 0
        self._changed = threading.Condition()

    def create(
        self, record: JobRecord, *, spec: JobSpec, idempotency_key: str | None = None
    ) -> JobRecord:
        with self._changed:
            if idempotency_key:
                earlier = self.posted(
                    record.owner, idempotency_key=idempotency_key, spec_digest=record.spec_digest
                )
                if earlier:
                    return earlier
            if record.id in self._records:
                return self._records[record.id]
            if idempotency_key:
                self._posted[record.owner, idempotency_key] = (record.id, record.spec_digest)
            self._specs[record.id] = spec
            self._write(None, record)
            return record

    def posted(self, owner: str, *, idempotency_key: str, spec_digest: str) -> JobRecord | None:
        with self._changed:
            if (owner, idempotency_key) not in self._posted:
                return None
            job_id, stored = self._posted[owner, idempotency_key]
            check_same_spec(idempotency_key, stored=stored, posted=spec_digest)
            return self._records[job_id]

    def get(self, job_id: str) -> JobRecord | None:
        with self._changed:
            return self._records.get(job_id)

    def spec(self, job_id: str) -> JobSpec | None:
        with self._changed:
            return self._specs.get(job_id)

    def many(self, job_ids: Sequence[str]) -> Sequence[JobRecord]:
        with self._changed:
            return [self._records[job_id] for job_id in job_ids if job_id in self._records]

    def owned(
        self,
        owner: str,
        *,
        state: JobState | None = None,
        limit: int = 100,
        after: Mark | None = None,
    ) -> Sequence[JobRecord]:
        with self._changed:
            found = [
                record
                for record in self._records.values()
                if record.owner == owner and state in (None, record.state)
            ]
        found.sort(key=lambda record: (record.created_s, record.id), reverse=True)
        if after is not None:
            found = [record for record in found if (record.created_s, record.id) < after]
        return found[:limit]

    def oldest(self, owner: str) -> Iterator[JobRecord]:
        with self._changed:
            found = [record for record in self._records.values() if record.owner == owner]
        yield from sorted(found, key=lambda record: (record.created_s, record.id))

    def num_by_owner(self) -> Mapping[str, int]:
        with self._changed:
            return Counter(record.owner for record in self._records.values())

    def owners(self) -> Sequence[str]:
        with self._changed:
            return sorted({record.owner for record in self._records.values()})

    def num_active(self, owner: str) -> int:
        return sum(record.owner == owner for record in self.active())

    def spec_bytes(self, owner: str) -> int:
        own = [record.id for record in self.active() if record.owner == owner]
        return sum(len(spec.model_dump_json()) for spec in map(self.spec, own) if spec)

    def active(self) -> Sequence[JobRecord]:
        with self._changed:
            found = [record for record in self._records.values() if not record.state.final]
        return sorted(found, key=lambda record: (record.created_s, record.id))

    def active_ids(self) -> Sequence[str]:
        return [record.id for record in self.active()]

    def update(
        self,
        job_id: str,
        transition: Transition,
        *,
        lease_s: float | None = None,
    ) -> JobRecord | None:
        with self._changed:
            before = self._records.get(job_id)
            after = transition(before) if before else None
            if after is None:
                return None
            self._write(before, after)
            if lease_s is not None:
                self._leases[job_id, after.attempt] = time.monotonic() + lease_s
            return after

    def beat(self, job_id: str, *, attempt: int, lease_s: float) -> JobRecord | None:
        with self._changed:
            self._leases[job_id, attempt] = time.monotonic() + lease_s
            return self._records.get(job_id)

    def leased(self, job_id: str, *, attempt: int) -> bool:
        with self._changed:
            return time.monotonic() < self._leases.get((job_id, attempt), 0.0)

    def events(self, job_id: str, *, after: str | None = None) -> Sequence[Event]:
        with self._changed:
            stream = self._events.get(job_id, ())
            return [event for event in stream if parse_id(event.id) > parse_id(after)]

    def changes(self, after: str | None, *, wait_s: float) -> tuple[str, Sequence[Change]]:
        with self._changed:
            if after is None:
                return str(len(self._changes)), ()
            start = int(after)
            self._changed.wait_for(lambda: len(self._changes) > start, timeout=wait_s)
            return str(len(self._changes)), self._changes[start:]

    def wake(self) -> None:
        with self._changed:
            self._ring(Change("", "wake"))

    def follow(self, job_ids: Sequence[str], *, for_s: float = FOLLOWED_S) -> Mapping[str, Place]:
        with self._changed:
            self._followed.update(dict.fromkeys(job_ids, time.monotonic() + for_s))
        return self.places(job_ids)

    def followed(self) -> Collection[str]:
        with self._changed:
            now = time.monotonic()
            self._followed = {job: until for job, until in self._followed.items() if now < until}
            return set(self._followed)

    def place(self, places: Mapping[str, Place], *, told: Collection[str] = ()) -> None:
        with self._changed:
            self._places = dict(places)
            for job_id in told:
                record = self._records.get(job_id)
                if record is not None and record.state is JobState.QUEUED:
                    self._tell(job_id, state_event(record, place=places[job_id]))
                    self._ring(Change(job_id, "position"))

    def places(self, job_ids: Sequence[str] | None = None) -> Mapping[str, Place]:
        with self._changed:
            ids = list(self._places) if job_ids is None else job_ids
            return {job_id: self._places[job_id] for job_id in ids if job_id in self._places}

    def ended(self, *, before_s: float, limit: int) -> Sequence[str]:
        with self._changed:
            found = [
                (record.finished_s, record.id)
                for record in self._records.values()
                if record.finished_s is not None and record.finished_s < before_s
            ]
        return [job_id for _, job_id in sorted(found)[:limit]]

    def forget(self, job_id: str) -> None:
        with self._changed:
            record = self._records.get(job_id)
            if record is None or not record.state.final:
                return
            self._records.pop(job_id)
            self._specs.pop(job_id, None)
            self._events.pop(job_id, None)
            self._posted = {key: job for key, job in self._posted.items() if job[0] != job_id}

    def result_bytes(self) -> Mapping[str, int]:
        with self._changed:
            found: Counter[str] = Counter()
            for record in self._records.values():
                found[record.owner] += record.result_bytes
        return {owner: num_bytes for owner, num_bytes in found.items() if num_bytes}

    def memory(self) -> Memory:
        return Memory(used_bytes=0)

    def ping(self) -> None:
        """Memory always answers."""

    def _write(self, before: JobRecord | None, after: JobRecord) -> None:
        self._records[after.id] = after
        if before is not None and not after.spec_is_read:
            self._specs.pop(after.id, None)
        if after.state is not JobState.QUEUED:
            self._places.pop(after.id, None)
        charge = charge_of(before, after, now_s=time.time())
        if charge is not None:
            self.usage.add(charge)
        event = event_of(before, after)
        if event is None:
            return
        self._tell(after.id, event)
        told = after if event.kind == "state" else None
        self._ring(Change(after.id, event.kind, final=event.final, record=told))

    def _tell(self, job_id: str, event: Event) -> None:
        self._ticks += 1
        stream = self._events.setdefault(job_id, deque(maxlen=MAX_EVENTS))
        stream.append(replace(event, id=f"{self._ticks}-0"))

    def _ring(self, change: Change) -> None:
        self._changes.append(change)
        self._changed.notify_all()
