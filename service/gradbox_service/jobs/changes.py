"""What a change of a job's record says, and how it is written to Redis.

A change writes record, indices, sums, use, the event for those who watch the job, and one entry in
the stream of all changes. Each function that takes a pipeline appends commands to it; its caller
sends them as a transaction. `event_in` and `change_in` read the entries of the two streams back.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

import redis
from redis.client import Pipeline

from gradbox.protocol import JobState
from gradbox_service.accounting import usage
from gradbox_service.jobs.charges import charge_of
from gradbox_service.jobs.damaged import read_record
from gradbox_service.jobs.record import JobRecord, QueuePosition

log = logging.getLogger(__name__)

# The id and the fields of a stream's entry.
Entry = tuple[bytes, dict[bytes, bytes]]

ACTIVE = "gradbox:active"
ENDED = "gradbox:ended"
POSITIONS = "gradbox:places"
FOLLOWED = "gradbox:followed"
OWNERS = "gradbox:owners"
POSTED = "gradbox:posted"
CHANGES = "gradbox:changes"
RESULT_BYTES = "gradbox:result-bytes"
# A job's stream keeps about this many events. A reader that missed older ones misses nothing: the
# newest state is always among the kept.
MAX_EVENTS = 1000
MAX_CHANGES = 10_000
# A change carries no larger record: the stream is to stay within a few MB.
MAX_CARRIED_BYTES = 2048


@dataclass(frozen=True)
class Event:
    """One entry of a job's stream.

    Attributes:
        id: grows along the stream; `after=id` reads on behind it.
        kind: `state` (data is a JobView) or `progress` (data is a ProgressView).
        data: JSON.
        final: whether this is the job's last event.
    """

    id: str
    kind: Literal["state", "progress"]
    data: str
    final: bool = False


@dataclass(frozen=True)
class Change:
    """Says that something about a job is new; what it is, the job's own stream says.

    `final` is set where the job has ended. `record` is how the change left the job's record; None
    where it has to be read: it was large, or an earlier version of gradbox made the change.

    Three are about no job: `worker`, that one announced something, `wake`, which ends every wait,
    and `missed`, that changes were trimmed before this reader came to them.
    """

    job_id: str
    kind: Literal["state", "progress", "position", "worker", "wake", "missed"]
    final: bool = False
    record: JobRecord | None = None


def write(pipe: Pipeline, before: JobRecord | None, after: JobRecord) -> None:
    """Store a record in place of its predecessor, and publish what changed."""
    text = after.to_json()
    pipe.set(job_key(after.id), text)
    if before is None or before.state is not after.state:
        _index(pipe, before, after)
    count_result(pipe, after.owner, after.result_bytes - (before.result_bytes if before else 0))
    charge = charge_of(before, after, now_s=time.time())
    if charge is not None:
        usage.write(pipe, charge)
    event = event_of(before, after)
    if event is None:
        return
    append_event(pipe, after.id, event)
    is_carried = event.kind == "state" and len(text) <= MAX_CARRIED_BYTES
    append_change(pipe, after.id, event.kind, final=event.final, record=text if is_carried else b"")


def _index(pipe: Pipeline, before: JobRecord | None, after: JobRecord) -> None:
    """Move a job whose state is new into the indices of that state."""
    index = index_key(after.owner, after.state)
    # Where a damaged record is replaced, nobody knows the former state; it was none of the final.
    former = index_key(after.owner, JobState.QUEUED if before is None else before.state)
    if index != former:
        pipe.zrem(former, after.id)
    if index != former or before is None:
        pipe.zadd(index, {after.id: after.created_s})
    if after.state.final:
        pipe.zrem(ACTIVE, after.id)
        pipe.zadd(ENDED, {after.id: after.finished_s or after.created_s})
        if before is not None and not after.spec_is_read:
            pipe.delete(spec_key(after.id))
    elif before is None:
        pipe.zadd(ACTIVE, {after.id: after.created_s})
    if after.state is not JobState.QUEUED and (before is None or before.state is JobState.QUEUED):
        pipe.hdel(POSITIONS, after.id)


def erase(pipe: Pipeline, record: JobRecord, *, posted: bytes | None) -> None:
    """Remove all that is stored of a job.

    Args:
        posted: the key of Redis that stands for its idempotency key.
    """
    pipe.delete(job_key(record.id), spec_key(record.id), events_key(record.id))
    if posted is not None:
        pipe.delete(posted)
    pipe.hdel(POSITIONS, record.id)
    pipe.hdel(POSTED, record.id)
    for index in (ACTIVE, ENDED, owner_key(record.owner), index_key(record.owner, record.state)):
        pipe.zrem(index, record.id)
    count_result(pipe, record.owner, -record.result_bytes)


def count_result(pipe: Pipeline, owner: str, num_bytes: int) -> None:
    """Count bytes of results for their owner; below zero for those that are gone."""
    if num_bytes:
        pipe.hincrby(RESULT_BYTES, owner, num_bytes)


def set_positions(
    pipe: Pipeline, positions: Mapping[str, QueuePosition], publish: Sequence[JobRecord]
) -> None:
    """Store the positions of queued jobs, and publish those of some."""
    pipe.delete(POSITIONS)
    if positions:
        pipe.hset(
            POSITIONS, mapping={job_id: found.to_json() for job_id, found in positions.items()}
        )
    for record in publish:
        append_event(pipe, record.id, state_event(record, waits_at=positions[record.id]))
        append_change(pipe, record.id, "position")


def append_event(pipe: Pipeline, job_id: str, event: Event) -> None:
    """Append an event to the job's stream."""
    fields: dict[Any, Any] = {"kind": event.kind, "data": event.data, "final": int(event.final)}
    pipe.xadd(events_key(job_id), fields, maxlen=MAX_EVENTS, approximate=True)


def append_change(
    pipe: Pipeline, job_id: str, kind: str, *, final: bool = False, record: bytes = b""
) -> None:
    """Say to all readers that the job has something new, or has ended.

    Args:
        record: the job's record as JSON, for readers who would read it at once.
    """
    fields: dict[Any, Any] = {"job": job_id, "kind": kind, "final": int(final)}
    if record:
        fields["record"] = record
    pipe.xadd(CHANGES, fields, maxlen=MAX_CHANGES, approximate=True)


def grant(pipe: Pipeline, job_id: str, *, attempt: int, lease_s: float) -> None:
    """Renew an attempt's lease."""
    pipe.set(lease_key(job_id, attempt), 1, px=max(1, int(lease_s * 1000)))


def event_of(before: JobRecord | None, after: JobRecord) -> Event | None:
    """Return the event of a change, without its id; None for a change after the job's end.

    A result may be deleted then; the final state is published once, and is the stream's last event.
    """
    if before is not None and before.state.final:
        return None
    if before is not None and replace(before, progress=after.progress) == after and after.progress:
        return Event("", "progress", after.progress.model_dump_json())
    return state_event(after)


def state_event(record: JobRecord, *, waits_at: QueuePosition | None = None) -> Event:
    """Return the event of a job's state, without its id."""
    view = record.view(waits_at=waits_at)
    return Event("", "state", view.model_dump_json(), record.state.final)


def parse_id(event_id: str | None) -> tuple[int, int]:
    """Return an event's id as numbers that can be compared; (0, 0) for one that is no id."""
    first, _, second = (event_id or "").partition("-")
    if not _is_number(first) or (second and not _is_number(second)):
        return (0, 0)
    return (int(first), int(second or 0))


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= 19


def event_in(entry_id: bytes, fields: Mapping[bytes, bytes]) -> Event | None:
    """Return the event; None, with its bytes logged, for an entry that is none."""
    try:
        kind = cast(Any, fields[b"kind"].decode())
        return Event(entry_id.decode(), kind, fields[b"data"].decode(), fields[b"final"] == b"1")
    except (KeyError, ValueError):
        log.error("entry %r of a job's events is left out: %r", entry_id, fields)
        return None


def change_in(entry_id: bytes, fields: Mapping[bytes, bytes]) -> Change | None:
    """Return the change; None, with its bytes logged, for an entry that is none."""
    try:
        kind = cast(Any, fields[b"kind"].decode())
        final = fields.get(b"final") == b"1"
        return Change(fields[b"job"].decode(), kind, final, _carried(fields.get(b"record")))
    except (KeyError, ValueError):
        log.error("entry %r of the box's changes is left out: %r", entry_id, fields)
        return None


def _carried(text: bytes | None) -> JobRecord | None:
    """Return the record that a change carries; None for a damaged one, which is read again."""
    try:
        return read_record(text)
    except ValueError:
        return None


def trimmed(connection: redis.Redis, cursor: str) -> bool:
    """Return whether the stream of changes no longer holds what came right after `cursor`."""
    oldest = cast("list[Entry]", connection.xrange(CHANGES, count=1))
    return bool(oldest) and parse_id(oldest[0][0].decode()) > parse_id(cursor)


def job_key(job_id: str) -> str:
    return f"gradbox:job:{job_id}"


def spec_key(job_id: str) -> str:
    return f"gradbox:spec:{job_id}"


def events_key(job_id: str) -> str:
    return f"gradbox:events:{job_id}"


def index_key(owner: str, state: JobState) -> str:
    """Return the index of an owner's jobs in a state; those that wait and those that run share one.

    A job changes between the two with every attempt, and few are in them.
    """
    return f"gradbox:{state if state.final else 'active'}:{owner}"


def owner_key(owner: str) -> str:
    return f"gradbox:owner:{owner}"


def posted_key(owner: str, idempotency_key: str) -> str:
    return f"gradbox:key:{owner}:{hashlib.sha256(idempotency_key.encode()).hexdigest()}"


def lease_key(job_id: str, attempt: int) -> str:
    return f"gradbox:lease:{job_id}:{attempt}"
