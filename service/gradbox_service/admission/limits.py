"""What one user may ask of a box that others share, and what is refused before it no longer fits.

memory     Redis takes four fifths of what it may; the rest is for jobs     ServiceUnavailable
           that were accepted: their progress, their leases, their end
           an owner's jobs take more of that than is left for all others    QueueFull
disk       its reserve is reached, it has no inode, or is read-only         StorageFull
"""

from __future__ import annotations

from typing import Final

from gradbox.errors import InvalidJob, OwnerOnly, QueueFull, ServiceUnavailable, StorageFull
from gradbox.protocol import PostedSpec
from gradbox.protocol.options import DEFAULT_TIMEOUT_S
from gradbox_service.identity.tokens import TokenInfo
from gradbox_service.jobs import Records
from gradbox_service.jobs.records import Memory
from gradbox_service.settings import Settings
from gradbox_service.store.room import Room, in_units

# Of the memory that Redis may take, what new jobs may fill.
NEW_JOBS_FRACTION: Final = 0.8


def check_values(body: bytes, *, settings: Settings) -> None:
    """Count the values in a body before it is parsed: each of them costs memory and time then.

    Raises:
        InvalidJob: there are more than the box takes.
    """
    num_values = sum(body.count(mark) for mark in b",[{")
    if num_values > settings.max_spec_values:
        raise InvalidJob(
            f"the body: expected at most {settings.max_spec_values} values in a job (commas and "
            f"opening brackets), got {num_values}; put more samples into each shard, or cut the "
            "job into several"
        )


def check_limits(posted: PostedSpec, *, caller: TokenInfo, settings: Settings) -> None:
    """Check what a job asks for itself.

    Raises:
        OwnerOnly: it wants to go before others' jobs.
        InvalidJob: it wants more time than this box gives a job; the default is cut to that.
    """
    if posted.priority > 0 and not caller.admin:
        raise OwnerOnly(
            f"priority: expected -10 to 0, got {posted.priority}; only the box's owner may let a "
            "job go before those of others: leave it out, or use the owner's token"
        )
    if DEFAULT_TIMEOUT_S != posted.timeout_s > settings.max_timeout_s:
        raise InvalidJob(
            f"timeout_s: expected at most {settings.max_timeout_s:g}, which is this box's limit, "
            f"got {posted.timeout_s:g}; cut the job into several, or ask the box's owner"
        )


def check_queue(num_active: int, *, settings: Settings) -> None:
    """Check that one more job of this owner may wait.

    Posts at the same moment may exceed the limit by their number.

    Args:
        num_active: how many of theirs wait or run.

    Raises:
        QueueFull: as many wait or run as may.
    """
    if num_active >= settings.max_queued_jobs:
        raise QueueFull(
            f"{num_active} of your jobs wait or run, and at most {settings.max_queued_jobs} may on "
            "this box: wait until some have ended, or cancel some (`gradbox jobs cancel ID`)"
        )


def check_memory(memory: Memory) -> None:
    """Check that Redis has memory for another job, or a blob.

    Raises:
        ServiceUnavailable: it has not.
    """
    if memory.bound_bytes is None or memory.used_bytes < NEW_JOBS_FRACTION * memory.bound_bytes:
        return
    raise ServiceUnavailable(
        f"the box's Redis takes {in_units(memory.used_bytes)} of the "
        f"{in_units(memory.bound_bytes)} that it may, and new jobs {NEW_JOBS_FRACTION:.0%} of "
        f"that; wait: jobs that ended make room within an hour, oldest first of whoever has most; "
        f"or have the box's owner raise --redis-memory-bytes"
    )


def check_leaves_room(owner: str, *, memory: Memory, records: Records) -> None:
    """Check that the specs of an owner's jobs take no more of Redis than is left to new jobs.

    So one owner has at most half of it, the next half of the rest, and there is always a rest.

    Raises:
        QueueFull: it is more.
    """
    if memory.bound_bytes is None:
        return
    left_bytes = NEW_JOBS_FRACTION * memory.bound_bytes - memory.used_bytes
    if memory.used_bytes <= left_bytes:
        return  # as then anybody's part of it is
    own_bytes = records.spec_bytes(owner)
    if own_bytes > left_bytes:
        raise QueueFull(
            f"the specs of your jobs that wait or run take {in_units(own_bytes)} of the box's "
            f"Redis, and leave {in_units(max(0.0, left_bytes))} to new jobs: wait until some have "
            f"ended, or cancel some (`gradbox jobs cancel ID`); fewer and larger shards make a job "
            f"smaller"
        )


def check_room(memory: Memory, room: Room) -> None:
    """Check that Redis and the disk have room for another job.

    Raises:
        ServiceUnavailable, StorageFull: they have not.
    """
    check_memory(memory)
    room.check(1, what="a new job")


def why_no_room(memory: Memory, room: Room) -> str:
    """Return why the box takes no new jobs of anybody for now; "" if it has room."""
    try:
        check_room(memory, room)
    except (ServiceUnavailable, StorageFull) as full:
        return str(full)
    return ""
