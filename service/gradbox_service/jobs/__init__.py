"""Job records, turns and the fleet: what the service and the workers share in Redis.

Each has a protocol, an implementation on Redis and a twin in memory. To read in this order:

    record, place                   one job, how it may change, and where it stands while it waits
    records, events                 the protocol of the store; what a change says to watchers
    redis_records, redis_changes    the store on Redis; how one change is written
    redis_lists, redis_places       its parts about an owner's jobs, and where queued ones stand
    redis_script                    commands that run together, if nothing changed meanwhile
    damaged                         what becomes of a record that cannot be read
    memory_records                  the twin
    usage                           what each owner used, charged once as an attempt ends
    turns, fleet                    RQ's short list; the workers and what they offer
    operation                       whether jobs are handed out and taken
    connection, refusals            how Redis is reached; when it refuses only for now
"""

from gradbox_service.jobs.connection import connect
from gradbox_service.jobs.fleet import Fleet, MemoryFleet, RedisFleet, WorkerPresence
from gradbox_service.jobs.memory_records import MemoryRecords
from gradbox_service.jobs.place import Place
from gradbox_service.jobs.record import JobRecord, Transition
from gradbox_service.jobs.records import Change, Event, Mark, Records
from gradbox_service.jobs.redis_records import RedisRecords
from gradbox_service.jobs.turns import QUEUE, SERIALIZER, TASK, MemoryTurns, RqTurns, Turn, Turns
from gradbox_service.jobs.usage import MemoryUsage, RedisUsage, Usage, Used

__all__ = [
    "QUEUE",
    "SERIALIZER",
    "TASK",
    "Change",
    "Event",
    "Fleet",
    "JobRecord",
    "Mark",
    "MemoryFleet",
    "MemoryRecords",
    "MemoryTurns",
    "MemoryUsage",
    "Place",
    "Records",
    "RedisFleet",
    "RedisRecords",
    "RedisUsage",
    "RqTurns",
    "Transition",
    "Turn",
    "Turns",
    "Usage",
    "Used",
    "WorkerPresence",
    "connect",
]
