"""What a change of a job's record says, and how it is written to Redis.

A change writes record, indices, sums, use, and one entry in the stream of all changes, which those
who watch the job hear of as its event. Each function that takes a pipeline appends commands to it;
its caller sends them as a transaction. `change_in` reads an entry of the stream back.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

import redis
from redis.client import Pipeline

from gradbox.protocol import JobState
from gradbox_service.accounting import usage
from gradbox_service.jobs.charges import charge_of
from gradbox_service.jobs.record import JobRecord, QueuePosition
from gradbox_service.jobs.turns import held_key

log = logging.getLogger(__name__)

# The id and the fields of a stream's entry.
Entry = tuple[bytes, dict[bytes, bytes]]

POSITIONS = "gradbox:places"
OWNERS = "gradbox:owners"
CHANGES = "gradbox:changes"
RESULT_BYTES = "gradbox:result-bytes"
# The stream keeps about this many changes. A reader that missed older ones reads the records.
MAX_CHANGES = 10_000
# A change carries no larger record: the stream is to stay within a few MB.
MAX_CARRIED_BYTES = 2048


@dataclass(frozen=True)
class Event:
    """What those who watch a job hear of a change.

    Attributes:
        id: grows along the stream; `after=id` reads on behind it.
        kind: `state` (data is a JobView) or `progress` (data is a ProgressView).
        data: JSON.
        final: whether this is the job's last event.
        again: whether it says more of the state that the event of the same id said.
    """

    id: str
    kind: Literal["state", "progress"]
    data: str
    final: bool = False
    again: bool = False


@dataclass(frozen=True)
class Change:
    """Says that something about a job is new.

    `final` is set where the job has ended. `record` is how the change left the job's record; None
    where it has to be read: it was large.

    Three are about no job: `worker`, that one announced something, `wake`, which ends every wait,
    and `missed`, that changes were trimmed before this reader came to them.
    """

    job_id: str
    kind: Literal["state", "progress", "worker", "wake", "missed"]
    final: bool = False
    record: JobRecord | None = None
    id: str = ""
    progress: str = ""

    @property
    def begins(self) -> bool:
        """Whether no earlier change, but its post, is of the job's state."""
        of = self.record
        if self.kind != "state" or of is None:
            return False
        runs_first = of.attempt == 1 and of.state is JobState.RUNNING
        return of.attempt == 0 or runs_first or of.unsaid

    @property
    def event(self) -> Event | None:
        """What those who watch the job hear; None where its record has to be read."""
        if self.kind == "progress":
            return Event(self.id, "progress", self.progress)
        return None if self.record is None else state_event(self.id, self.record)


def state_event(event_id: str, record: JobRecord, position: QueuePosition | None = None) -> Event:
    """Return the event of a job's state."""
    view = record.view(waits_at=position)
    return Event(event_id, "state", view.model_dump_json(), record.state.final)


def write(pipe: Pipeline, before: JobRecord | None, after: JobRecord) -> None:
    """Store a record in place of its predecessor, and say what changed, unless it is `unsaid`."""
    text = after.to_json()
    pipe.set(job_key(after.id), text)
    if before is None or before.state is not after.state:
        _index(pipe, before, after)
    count_result(pipe, after.owner, after.result_bytes - (before.result_bytes if before else 0))
    charge = charge_of(before, after, now_s=time.time())
    if charge is not None:
        usage.write(pipe, charge)
    if before is not None and before.state.final:
        return  # a result may be deleted then; the final state is said once, and comes last
    if after.unsaid and not after.state.final:
        return
    progress = after.progress
    only_further = (
        progress is not None
        and before is not None
        and replace(before, progress=progress, unsaid=False) == after
    )
    if not only_further or (before is not None and before.unsaid):
        append_change(pipe, after.id, "state", final=after.state.final, record=text)
    if only_further and progress is not None:
        append_change(pipe, after.id, "progress", progress=progress.model_dump_json())


def _index(pipe: Pipeline, before: JobRecord | None, after: JobRecord) -> None:
    """Move a job whose state is new into the indices of that state."""
    index = index_key(after.owner, after.state)
    former = None if before is None else index_key(before.owner, before.state)
    if former is not None and index != former:
        pipe.zrem(former, after.id)
    if index is not None and index != former:
        pipe.zadd(index, {after.id: after.created_s})
    if after.state.final and before is not None and not after.spec_is_read:
        pipe.delete(spec_key(after.id))


def erase(pipe: Pipeline, record: JobRecord) -> None:
    """Remove all that is stored of a job."""
    pipe.delete(job_key(record.id), spec_key(record.id))
    if record.idempotency_key:
        pipe.delete(posted_key(record.owner, record.idempotency_key))
    for index in (owner_key(record.owner), index_key(record.owner, record.state)):
        if index is not None:
            pipe.zrem(index, record.id)
    count_result(pipe, record.owner, -record.result_bytes)


def count_result(pipe: Pipeline, owner: str, num_bytes: int) -> None:
    """Count bytes of results for their owner; below zero for those that are gone."""
    if num_bytes:
        pipe.hincrby(RESULT_BYTES, owner, num_bytes)


def append_change(
    pipe: Pipeline,
    job_id: str,
    kind: str,
    *,
    final: bool = False,
    record: bytes = b"",
    progress: str = "",
) -> None:
    """Say to all readers that the job has something new, or has ended.

    Args:
        record: the job's record as JSON, for readers who would read it at once.
        progress: as JSON.
    """
    fields: dict[Any, Any] = {"job": job_id, "kind": kind, "final": int(final)}
    if 0 < len(record) <= MAX_CARRIED_BYTES:
        fields["record"] = record
    if progress:
        fields["progress"] = progress
    pipe.xadd(CHANGES, fields, maxlen=MAX_CHANGES, approximate=True)


def grant(pipe: Pipeline, job_id: str, *, attempt: int, lease_s: float) -> None:
    """Renew an attempt's lease."""
    pipe.set(lease_key(job_id, attempt), 1, px=max(1, int(lease_s * 1000)))


def hold(pipe: Pipeline, worker: str, record: JobRecord) -> None:
    """Note that a worker's device has the record's attempt in hand, as long as that runs."""
    runs = record.state is JobState.RUNNING
    pipe.set(held_key(worker), f"{record.id} {record.attempt}" if runs else "")


def parse_id(event_id: str | None) -> tuple[int, int]:
    """Return an event's id as numbers that can be compared; (0, 0) for one that is no id."""
    first, _, second = (event_id or "").partition("-")
    if not _is_number(first) or (second and not _is_number(second)):
        return (0, 0)
    return (int(first), int(second or 0))


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= 19


def change_in(entry_id: bytes, fields: Mapping[bytes, bytes]) -> Change | None:
    """Return the change; None, with its bytes logged, for an entry that is none."""
    try:
        kind = cast(Any, fields[b"kind"].decode())
        return Change(
            fields[b"job"].decode(),
            kind,
            fields.get(b"final") == b"1",
            _carried(fields.get(b"record")),
            id=entry_id.decode(),
            progress=fields.get(b"progress", b"").decode(),
        )
    except (KeyError, ValueError):
        log.error("entry %r of the box's changes is left out: %r", entry_id, fields)
        return None


def _carried(text: bytes | None) -> JobRecord | None:
    """Return the record that a change carries; None for a damaged one, which is read again."""
    try:
        return None if text is None else JobRecord.from_json(text)
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


def index_key(owner: str, state: JobState) -> str | None:
    """Return the index of an owner's jobs in a state; those that wait and those that run share one.

    A job changes between the two with every attempt, and few are in them. Most jobs are done, so
    those have none: they are found among all of the owner's.
    """
    if state is JobState.DONE:
        return None
    return f"gradbox:{state}:{owner}" if state.final else active_key(owner)


def active_key(owner: str) -> str:
    return f"gradbox:active:{owner}"


def owner_key(owner: str) -> str:
    return f"gradbox:owner:{owner}"


def posted_key(owner: str, idempotency_key: str) -> str:
    return f"gradbox:key:{owner}:{hashlib.sha256(idempotency_key.encode()).hexdigest()}"


def lease_key(job_id: str, attempt: int) -> str:
    return f"gradbox:lease:{job_id}:{attempt}"
