"""Turns in RQ carry an id and nothing else."""

from __future__ import annotations

import redis
import rq

from gradbox_service.backing import Backing
from gradbox_service.jobs import QUEUE, SERIALIZER, Turn, Turns
from gradbox_service.jobs.turns import turn_of


def test_turns_are_waiting_in_the_order_they_were_fed(backing: Backing) -> None:
    turns = [Turn("a", 1), Turn("b", 2), Turn("a", 1)]
    for turn in turns:
        backing.turns.feed(turn)
    assert list(backing.turns.waiting()) == turns


def test_rq_is_given_an_id_and_nothing_else(connection: redis.Redis) -> None:
    Turns(connection).feed(Turn("some-job", 1))
    (rq_id,) = rq.Queue(QUEUE, connection=connection).get_job_ids()
    assert turn_of(rq_id) == Turn("some-job", 1)
    assert not connection.keys("rq:job:*")


def test_a_worker_takes_a_turn_by_its_id_and_leaves_out_what_is_none(
    connection: redis.Redis,
) -> None:
    queue, turns = rq.Queue(QUEUE, connection=connection, serializer=SERIALIZER), Turns(connection)
    queue.enqueue("os.getcwd", job_id="a858fd85-cbc8-49d9-8123-5d2f0c9be711")
    turns.feed(Turn("some-job", 1))
    assert turns.take(wait_s=1) is None
    assert turns.take(wait_s=1) == Turn("some-job", 1)
    assert not connection.exists(queue.key, queue.intermediate_queue_key)
    assert turns.take(wait_s=0.01) is None
