"""RQ's worker with no more bookkeeping for a turn than somebody reads.

A turn is a job of RQ whose record is ours, so RQ's own results, dependents, callbacks, timings and
executions are of no use; left as they are, they are 75 commands a turn, most of them each a round
trip. What is kept:

    rq:wip:QUEUE            a taken turn, which the dispatcher reads and RQ's maintenance ends
    QUEUE:intermediate      a turn between dequeuing and begin, which RQ's maintenance takes back
    rq:worker:NAME          the worker's state, current job and heartbeat, as `rq info` shows them
    rq:execution:…          written by the heartbeats of turns that take a while

What is here is lost without harm, like a turn itself; so pipelines are no transactions.
"""

from __future__ import annotations

import time
from typing import Any, Final
from uuid import uuid4

from redis.client import Pipeline
from rq import SimpleWorker
from rq.executions import Execution, ExecutionRegistry
from rq.job import Job
from rq.queue import Queue
from rq.registry import StartedJobRegistry
from rq.utils import now
from rq.worker.base import WorkerStatus

# A worker that is known for 80 s says so once in this time at most, and looks as often for what RQ
# may have been told (`rq suspend`).
BETWEEN_S: Final = 1.0


class BookkeepingWorker(SimpleWorker):
    """A worker of RQ for turns: quick jobs without results, dependents or callbacks."""

    _heartbeat_s = -BETWEEN_S
    _suspension_s = -BETWEEN_S

    def set_state(self, state: str, pipeline: Pipeline | None = None) -> None:
        """Say what the worker does, if that is new."""
        if pipeline is not None or state != self.get_state():
            super().set_state(state, pipeline=pipeline)

    def heartbeat(self, timeout: int | None = None, pipeline: Pipeline | None = None) -> None:
        """Say that the worker lives, if it has not said so within the second."""
        if pipeline is not None:
            super().heartbeat(timeout, pipeline)
        elif time.monotonic() - self._heartbeat_s >= BETWEEN_S:
            super().heartbeat(timeout)
            self._heartbeat_s = time.monotonic()

    def check_for_suspension(self, burst: bool) -> None:
        """Wait while workers are suspended, as looked up within the second."""
        if time.monotonic() - self._suspension_s >= BETWEEN_S:
            super().check_for_suspension(burst)
            self._suspension_s = time.monotonic()

    def prepare_execution(self, job: Job) -> Execution:
        """Note the turn as taken, and no longer as on its way to a worker."""
        self.execution = Execution(uuid4().hex, job.id, self.connection, worker_name=self.name)
        fields: dict[Any, Any] = {"state": WorkerStatus.BUSY.value, "current_job": job.id}
        with self.connection.pipeline(transaction=False) as pipe:
            ttl_s = self.get_heartbeat_ttl(job)
            job.started_job_registry.add_execution(self.execution, pipeline=pipe, ttl=ttl_s)
            pipe.lrem(self.queues[0].intermediate_queue_key, 1, job.id)
            pipe.hset(self.key, mapping=fields)
            pipe.execute()
        self._state = WorkerStatus.BUSY
        return self.execution

    def prepare_job_execution(self, job: Job, remove_from_intermediate_queue: bool = False) -> None:
        """Do nothing more: `prepare_execution` has done what there is to do."""

    def handle_execution_ended(self, job: Job, queue: Queue, heartbeat_ttl: int) -> None:
        """Note the end here: the job's hash is about to be deleted."""
        job.ended_at = now()

    def handle_job_success(
        self, job: Job, queue: Queue, started_job_registry: StartedJobRegistry
    ) -> None:
        """Remove all that RQ knows of the turn."""
        execution = self.execution
        assert execution is not None  # since prepare_execution
        executions = ExecutionRegistry(job_id=job.id, connection=self.connection)
        with self.connection.pipeline(transaction=False) as pipe:
            pipe.zrem(started_job_registry.key, execution.composite_key)
            pipe.delete(job.key, execution.key, executions.key)
            pipe.hset(self.key, "state", WorkerStatus.IDLE.value)
            pipe.hdel(self.key, "current_job")
            pipe.execute()
        self.execution, self._state = None, WorkerStatus.IDLE
