"""Turns in RQ carry an id and nothing else."""

from __future__ import annotations

import json
import time

import redis
import rq
from rq.registry import StartedJobRegistry

from gradbox_service.backing import Backing
from gradbox_service.jobs import QUEUE, SERIALIZER, TASK, RqTurns, Turn


def test_turns_are_waiting_in_the_order_they_were_fed(backing: Backing) -> None:
    turns = [Turn("a", 1), Turn("b", 2), Turn("a", 1)]
    for turn in turns:
        backing.turns.feed(turn)
    assert list(backing.turns.waiting()) == turns
    assert backing.turns.started() == frozenset()


def test_rq_is_given_the_id_as_json_and_the_tasks_name(connection: redis.Redis) -> None:
    RqTurns(connection).feed(Turn("some-job", 1))
    queue = rq.Queue(QUEUE, connection=connection, serializer=SERIALIZER)
    (job,) = queue.jobs
    assert (job.func_name, job.args, job.kwargs) == (TASK, ["some-job"], {})
    assert (job.timeout, job.result_ttl) == (-1, 0)
    assert json.loads(job.data.decode()) == [TASK, None, ["some-job"], {}]


def test_a_started_turn_counts_while_its_execution_beats(connection: redis.Redis) -> None:
    turns = RqTurns(connection)
    queue = rq.Queue(QUEUE, connection=connection, serializer=SERIALIZER)
    registry = StartedJobRegistry(queue=queue)
    now = time.time()
    connection.zadd(registry.key, {"live-1-aa:x": now + 20, "dead-1-bb:x": now - 1})
    assert turns.started() == frozenset({Turn("live", 1)})
