"""Turns: job ids in RQ's list. A turn says "run this job next" and can be lost without harm.

A worker has a list of its own beside it, for jobs on a run whose state its device has.

RQ's list has nothing but an id of each turn, which says all there is to know of it. What runs it is
the device process of a worker, and the job's record says the rest.
"""

from __future__ import annotations

import logging
import re
import secrets
from collections.abc import Sequence
from typing import NamedTuple, cast

import redis
import rq
from redis.client import Pipeline

from gradbox_service.database.conditional_commands import ConditionalCommands

log = logging.getLogger(__name__)

# One queue for every worker. A worker on two queues would lose a job between them (rq/rq#1716).
QUEUE = "gradbox"
SERIALIZER = "json"
# Random ones, which tell one feeding of a turn from another.
OWN_BYTES = 4


class Turn(NamedTuple):
    """A turn begins one attempt of one job: an earlier one that still lingers is another turn."""

    job_id: str
    attempt: int


class Turns:
    """The short list that workers take jobs from: that of RQ."""

    def __init__(self, connection: redis.Redis) -> None:
        self._redis = connection
        self._queue = rq.Queue(QUEUE, connection=connection, serializer=SERIALIZER)
        self._commands = ConditionalCommands(connection, over_bound=True)

    def feed(self, turn: Turn) -> None:
        """Append a turn."""
        pipe = self._redis.pipeline()
        self.push(pipe, turn)
        self._commands.run(pipe, where={})

    def push(self, pipe: Pipeline, turn: Turn, *, worker: str = "") -> None:
        """Append a turn by a transaction of the caller's.

        Args:
            worker: whose own list it is appended to, which idles and has what the job needs. If it
                has gone by then, the turn is lost.
        """
        # The same turn may be fed twice. RQ must not take the second for the first, so each has an
        # id of its own.
        rq_id = f"{turn.job_id}-{turn.attempt}-{secrets.token_hex(OWN_BYTES)}"
        if worker:
            pipe.rpush(self._own_key(worker), rq_id)
        else:
            self._queue.push_job_id(rq_id, pipeline=pipe)

    def take_back(self) -> None:
        """Remove the turns that nobody has taken yet."""
        self._queue.empty()  # type: ignore[no-untyped-call]  # RQ does not annotate it

    def withdraw(self, turn: Turn) -> bool:
        """Remove one turn; False if somebody has taken it."""
        removed = 0
        for rq_id in [rq_id for rq_id in self._queue.get_job_ids() if turn_of(rq_id) == turn]:
            # A worker takes a turn by one command, too: it is either in the list or taken.
            removed += self._redis.lrem(self._queue.key, 0, rq_id)
        return removed > 0

    def waiting(self) -> Sequence[Turn]:
        """Return the turns that nobody has taken yet, next first."""
        return [turn for turn in map(turn_of, self._queue.get_job_ids()) if turn is not None]

    def take(self, *, wait_s: float, worker: str = "") -> Turn | None:
        """Take the next turn, first of those that are this worker's own.

        None if none came within `wait_s`.

        It is popped, which Redis does also where it is full, and not moved to a second list as by
        RQ: if its job is not begun, the dispatcher feeds another.
        """
        taken = self._redis.blpop([self._own_key(worker), self._queue.key], timeout=wait_s)
        if taken is None:
            return None
        rq_id = cast(bytes, taken[1]).decode()
        turn = turn_of(rq_id)
        if turn is None:
            log.error("the queue %s has %r, which is no turn, and is left out", QUEUE, rq_id)
        return turn

    def _own_key(self, worker: str) -> str:
        return f"{self._queue.key}:{worker}"

    def held(self, worker: str) -> Turn | None:
        """Return the turn that a worker's device has in hand, whoever may have its job by now."""
        found = cast("bytes | None", self._redis.get(held_key(worker)))
        job_id, _, attempt = (found or b"").decode().rpartition(" ")
        return Turn(job_id, int(attempt)) if found else None

    def let_go(self, worker: str) -> None:
        """Note that a worker's device has nothing in hand any more."""
        self._redis.delete(held_key(worker))


def held_key(worker: str) -> str:
    return f"gradbox:held:{worker}"


def turn_of(rq_id: str) -> Turn | None:
    """Return the turn that RQ's job is; None for one that `feed` did not make."""
    found = _RQ_ID.fullmatch(rq_id)
    return None if found is None else Turn(found[1], int(found[2]))


# Exactly as many digits as `feed` gives: some of RQ's own ids, UUIDs, differ in that alone.
_RQ_ID = re.compile(rf"(.+)-(\d{{1,9}})-[0-9a-f]{{{2 * OWN_BYTES}}}")
