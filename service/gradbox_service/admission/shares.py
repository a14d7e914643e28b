"""What is refused before it is taken: more jobs than fit Redis, and all where the disk takes none.

memory     Redis takes four fifths of what it may; the rest is for jobs     ServiceUnavailable
           that were accepted: their progress, their leases, their end
           an owner's jobs take more of that than is left for all others    QueueFull
disk       its reserve is reached, it has no inode, or is read-only         StorageFull
"""

from __future__ import annotations

from typing import Final

from gradbox.errors import QueueFull, ServiceUnavailable, StorageFull
from gradbox_service.jobs import Records
from gradbox_service.jobs.records import Memory
from gradbox_service.store.room import Room, in_units

# Of the memory that Redis may take, what new jobs may fill.
NEW_JOBS_SHARE: Final = 0.8


def check_memory(memory: Memory) -> None:
    """Check that Redis has memory for another job, or a blob.

    Raises:
        ServiceUnavailable: it has not.
    """
    if memory.bound_bytes is None or memory.used_bytes < NEW_JOBS_SHARE * memory.bound_bytes:
        return
    raise ServiceUnavailable(
        f"the box's Redis takes {in_units(memory.used_bytes)} of the "
        f"{in_units(memory.bound_bytes)} that it may, and new jobs {NEW_JOBS_SHARE:.0%} of that; "
        f"wait: jobs that ended make room within an hour, oldest first of whoever has most; or "
        f"have the box's owner raise --redis-memory-bytes"
    )


def check_leaves_room(owner: str, *, memory: Memory, records: Records) -> None:
    """Check that the specs of an owner's jobs take no more of Redis than is left to new jobs.

    So one owner has at most half of it, the next half of the rest, and there is always a rest.

    Raises:
        QueueFull: it is more.
    """
    if memory.bound_bytes is None:
        return
    left_bytes = NEW_JOBS_SHARE * memory.bound_bytes - memory.used_bytes
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
