"""What the pool logs, for the head to write: an actor's own output goes to a file of Ray's."""

from __future__ import annotations

import logging
from collections import deque
from typing import Final

MOST: Final = 1000


class KeptMessages(logging.Handler):
    """Keeps what this package logs in a process, the newest `MOST` messages."""

    def __init__(self) -> None:
        """Keep warnings, and what is worse, from now on."""
        super().__init__(logging.WARNING)
        self._messages: deque[str] = deque(maxlen=MOST)
        logging.getLogger("gradbox_worker").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a message."""
        self._messages.append(record.getMessage())

    def taken(self) -> list[str]:
        """Return those since the last call."""
        return [self._messages.popleft() for _ in range(len(self._messages))]
