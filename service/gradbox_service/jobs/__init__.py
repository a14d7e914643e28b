"""Job records and turns: what the service and the workers share in Redis.

To read in this order:

    record     one job, how it may change, and where it stands while it waits
    records    the store of them
    changes    what a change says to those who watch, and how it is written
    charges    what a change of a record costs its owner
    turns      RQ's short list
"""

from gradbox_service.jobs.changes import Change, Event
from gradbox_service.jobs.record import JobRecord, QueuePosition, Transition
from gradbox_service.jobs.records import Mark, Records
from gradbox_service.jobs.turns import QUEUE, SERIALIZER, Turn, Turns

__all__ = [
    "QUEUE",
    "SERIALIZER",
    "Change",
    "Event",
    "JobRecord",
    "Mark",
    "QueuePosition",
    "Records",
    "Transition",
    "Turn",
    "Turns",
]
