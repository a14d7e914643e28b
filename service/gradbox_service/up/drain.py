"""When a box that drains has nothing left to do, so that `gradbox up` may end."""

from __future__ import annotations

import time
from typing import Final

import redis

from gradbox.protocol import JobState, OperationMode, OperationView
from gradbox_service.database.connection import connect
from gradbox_service.fleet.operation import Operation
from gradbox_service.jobs import Records

LOOK_S: Final = 0.5
ANSWER_S: Final = 5.0


class Drain:
    """Reads the box's mode of operation now and then."""

    def __init__(self, redis_url: str) -> None:
        self._connection = connect(redis_url, retries=0, timeout_s=ANSWER_S)
        self._operation = Operation(self._connection)
        self._next_look_s = 0.0

    def close(self) -> None:
        self._connection.close()

    def forget(self) -> OperationView:
        """Let a box that drained before it was started again run; return its mode then."""
        found = self._operation.read()
        if found.mode is not OperationMode.DRAINING:
            return found
        self._operation.set(OperationView())
        return OperationView()

    def is_over(self) -> bool:
        """Return whether the box drains and nothing runs; False until the next look is due."""
        now = time.monotonic()
        if now < self._next_look_s:
            return False
        self._next_look_s = now + LOOK_S
        try:
            if self._operation.read().mode is not OperationMode.DRAINING:
                return False
            active = Records(self._connection).active()
        except redis.RedisError:  # it is started again, or refuses for now
            return False
        return not any(record.state is JobState.RUNNING for record in active)
