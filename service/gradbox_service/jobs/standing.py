"""How the box stands when a job is posted: what admission asks, in one look at Redis."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import redis

from gradbox.protocol import JobState, OperationView
from gradbox_service.jobs.fleet import Fleet, RedisFleet, WorkerPresence
from gradbox_service.jobs.operation import OPERATION, Operation, read_operation
from gradbox_service.jobs.records import Memory, Records
from gradbox_service.jobs.redis_changes import ASK_MEMORY, index_key, memory_in


@dataclass(frozen=True)
class Standing:
    """How the box stands for one who posts a job.

    Attributes:
        operation: what the box's owner says.
        memory: of the store of records.
        num_active: how many jobs the poster has queued or running.
        workers: those that live.
    """

    operation: OperationView
    memory: Memory
    num_active: int
    workers: Sequence[WorkerPresence]


class Standings(Protocol):
    """Tells at once what the stores tell one by one."""

    def read(self, owner: str) -> Standing:
        """Return how the box stands for a job of this owner."""


class RedisStandings:
    """Implements `Standings` with one pipeline."""

    def __init__(self, connection: redis.Redis, *, fleet: RedisFleet) -> None:
        self._redis = connection
        self._fleet = fleet

    def read(self, owner: str) -> Standing:
        with self._redis.pipeline(transaction=False) as pipe:
            pipe.get(OPERATION)
            cast(Any, pipe).execute_command(ASK_MEMORY)
            pipe.zcard(index_key(owner, JobState.QUEUED))
            names = self._fleet.queue_workers(pipe)
            operation, memory, num_active, *presences = pipe.execute()
        return Standing(
            operation=read_operation(operation),
            memory=memory_in(memory),
            num_active=num_active,
            workers=self._fleet.parse_workers(names, presences),
        )


class ComposedStandings:
    """Implements `Standings` by asking one after the other."""

    def __init__(self, records: Records, *, fleet: Fleet, operation: Operation) -> None:
        self._records = records
        self._fleet = fleet
        self._operation = operation

    def read(self, owner: str) -> Standing:
        return Standing(
            operation=self._operation.read(),
            memory=self._records.memory(),
            num_active=self._records.num_active(owner),
            workers=self._fleet.workers(),
        )
