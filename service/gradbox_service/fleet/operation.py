"""Whether jobs are handed to workers and new ones taken: one flag for all parts of a box."""

from __future__ import annotations

import logging
from typing import cast

import redis

from gradbox.protocol import OperationView
from gradbox_service.database.conditional_commands import ConditionalCommands

log = logging.getLogger(__name__)

OPERATION = "gradbox:operation"


class Operation:
    """The flag that the box's owner sets, and that dispatcher and admission read: one key."""

    def __init__(self, connection: redis.Redis) -> None:
        self._redis = connection
        self._commands = ConditionalCommands(connection, over_bound=True)

    def read(self) -> OperationView:
        """Return what was set last; a box is running before."""
        return read_operation(cast("bytes | None", self._redis.get(OPERATION)))

    def set(self, operation: OperationView) -> None:
        """Set it, also for a box that is started again."""
        pipe = self._redis.pipeline()
        pipe.set(OPERATION, operation.model_dump_json())
        self._commands.run(pipe, where={})


def read_operation(text: bytes | None) -> OperationView:
    """Return what stands under `OPERATION`; a box of which nothing is said is running."""
    if text is None:
        return OperationView()
    try:
        return OperationView.model_validate_json(text)
    except ValueError:
        log.error("%s is no mode of operation and counts as running: %r", OPERATION, text[:200])
        return OperationView()
