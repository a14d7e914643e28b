"""RQ's worker with no more bookkeeping for a turn than somebody reads.

A turn is a job of RQ whose record is ours, so RQ's own results, dependents, callbacks, timings and
executions are of no use; left as they are, they are 75 commands a turn, most of them each a round
trip. What is kept:

    rq:queue:QUEUE          the ids of the turns that wait
    rq:worker:NAME          the worker's state and heartbeat, as `rq info` shows them

A turn that is taken is in no list any more: once its job is begun, the job's record and its lease
say who has it, and if it is not, the dispatcher feeds another. So a turn is popped, which Redis
does also where it has all the memory that it may, and not moved to a second list as RQ does.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from typing import Any, Final
from uuid import uuid4

import redis
from redis.client import Pipeline
from rq import SimpleWorker
from rq.executions import Execution
from rq.job import Job
from rq.queue import Queue
from rq.utils import now
from rq.worker.base import WorkerStatus

from gradbox_service.database.conditional_commands import ConditionalCommands
from gradbox_service.jobs import SERIALIZER, TASK, Turn
from gradbox_service.jobs.turns import NO_TIMEOUT, turn_of

log = logging.getLogger(__name__)

# A worker that is known for 80 s says so once in this time at most, and looks as often for what RQ
# may have been told (`rq suspend`).
BETWEEN_S: Final = 1.0


class TurnOfRq(Job):
    """RQ's side of a turn."""

    @classmethod
    def taken(cls, rq_id: str, turn: Turn, *, connection: redis.Redis) -> Job:
        """Return it, made of its id alone."""
        return cls.create(
            TASK,
            args=[turn.job_id],
            id=rq_id,
            connection=connection,
            timeout=NO_TIMEOUT,
            description=rq_id,
            serializer=SERIALIZER,
        )

    def perform(self) -> Any:
        """Run the task; RQ would first lift the expiry of what is forgotten here."""
        return self._execute()


class QueueOfTurns(Queue):
    """A queue of which every turn's id says all that there is to know of it."""

    @classmethod
    def dequeue_any(
        cls,
        queues: Iterable[Queue],
        timeout: int | None,
        connection: redis.Redis,
        *_: Any,
        **__: Any,
    ) -> tuple[Job, Queue] | None:
        """Take the next turn."""
        (queue,) = queues
        while (taken := cls.lpop([queue.key], timeout, connection)) is not None:
            rq_id = taken[1].decode()
            turn = turn_of(rq_id)
            if turn is not None:
                return TurnOfRq.taken(rq_id, turn, connection=connection), queue
            log.error("the queue %s has %r, which is no turn, and is left out", queue.name, rq_id)
        return None


class BookkeepingWorker(SimpleWorker):
    """A worker of RQ for turns: jobs without results, dependents or callbacks."""

    queue_class = QueueOfTurns
    _told_state = ""
    _heartbeat_s = -BETWEEN_S
    _suspension_s = -BETWEEN_S

    def register_birth(self) -> None:
        """Note that the worker begins; where Redis has no memory, its heartbeats alone say so."""
        with suppress(redis.OutOfMemoryError):
            super().register_birth()  # type: ignore[no-untyped-call]

    def subscribe(self) -> None:
        """Listen to no commands: signals end a worker, and a record cancels its job.

        RQ's listener would take a thread and a connection, and end with a traceback where a Redis
        on a Unix socket is started again.
        """

    def set_state(self, state: str, pipeline: Pipeline | None = None) -> None:
        """Note what the worker does, and tell it if that is new."""
        self._state = state
        if state != self._told_state:
            self._tell(partial(super().set_state, state))
            self._told_state = state

    def heartbeat(self, timeout: int | None = None, pipeline: Pipeline | None = None) -> None:
        """Say that the worker lives, if it has not said so within the second."""
        if time.monotonic() - self._heartbeat_s >= BETWEEN_S:
            self._tell(partial(super().heartbeat, timeout))
            self._heartbeat_s = time.monotonic()

    def _tell(self, say: Callable[..., None]) -> None:
        """Tell RQ, also where Redis has all the memory that it may."""
        pipe = self.connection.pipeline()
        say(pipeline=pipe)
        ConditionalCommands(self.connection, over_bound=True).run(pipe, where={})

    def maintain_heartbeats(self, job: Job) -> None:
        """Say so within a turn that takes a while, and that the worker is busy."""
        self.set_state(WorkerStatus.BUSY)
        BookkeepingWorker.heartbeat(self)  # a subclass's may wait, and here a job is watched

    def check_for_suspension(self, burst: bool) -> None:
        """Wait while workers are suspended, as looked up within the second."""
        if time.monotonic() - self._suspension_s >= BETWEEN_S:
            super().check_for_suspension(burst)
            self._suspension_s = time.monotonic()

    def prepare_execution(self, job: Job) -> Execution:
        """Note nothing in Redis: the turn is this worker's."""
        self._state = WorkerStatus.BUSY  # told by the first heartbeat of a turn that has one
        return Execution(uuid4().hex, job.id, self.connection, worker_name=self.name)

    def prepare_job_execution(self, job: Job, remove_from_intermediate_queue: bool = False) -> None:
        """Do nothing more."""

    def handle_execution_ended(self, job: Job, queue: Queue, heartbeat_ttl: int) -> None:
        """Note the end here alone."""
        job.ended_at = now()

    def handle_job_success(self, job: Job, queue: Queue, started_job_registry: Any) -> None:
        """Do nothing: the job's record says how it ended."""

    def handle_job_failure(
        self, job: Job, queue: Queue, started_job_registry: Any = None, exc_string: str = ""
    ) -> None:
        """Do nothing for a turn that was not begun; the dispatcher feeds another."""
