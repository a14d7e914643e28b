"""Job records and turns: what the service and the workers share in Redis.

Each has a protocol, an implementation on Redis and a twin in memory. To read in this order:

    record, place                   one job, how it may change, and where it stands while it waits
    records, events                 the protocol of the store; what a change says to watchers
    redis_records, redis_changes    the store on Redis; how one change is written
    redis_lists, redis_places       its parts about an owner's jobs, and where queued ones stand
    damaged                         what becomes of a record that cannot be read
    memory_records                  the twin
    charges                         what a change of a record costs its owner
    turns                           RQ's short list
"""

from gradbox_service.jobs.memory_records import MemoryRecords
from gradbox_service.jobs.place import Place
from gradbox_service.jobs.record import JobRecord, Transition
from gradbox_service.jobs.records import Change, Event, Mark, Records
from gradbox_service.jobs.redis_records import RedisRecords
from gradbox_service.jobs.turns import QUEUE, SERIALIZER, TASK, MemoryTurns, RqTurns, Turn, Turns

__all__ = [
    "QUEUE",
    "SERIALIZER",
    "TASK",
    "Change",
    "Event",
    "JobRecord",
    "Mark",
    "MemoryRecords",
    "MemoryTurns",
    "Place",
    "Records",
    "RedisRecords",
    "RqTurns",
    "Transition",
    "Turn",
    "Turns",
]
