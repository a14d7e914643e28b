"""The changes that a process's one reader of their stream has read, for the dispatcher beside it.

A reader of its own would cost a blocking command, and a thread's wait in it, for every change.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from gradbox_service.jobs import Change, JobRecord
from gradbox_service.jobs.changes import MAX_CHANGES


class PassedChanges:
    """Holds what the reader passed on until `changes` takes it."""

    def __init__(self) -> None:
        self._passed = threading.Condition()
        self._untaken: list[Change] = []
        self._cursor = "0-0"

    def pass_on(self, cursor: str, changes: Sequence[Change]) -> None:
        """Hand over what the reader has read, up to `cursor`.

        More than anybody takes is forgotten, which the taker is told as of a stream that was
        trimmed.
        """
        with self._passed:
            self._cursor = cursor
            self._untaken += changes
            if len(self._untaken) > MAX_CHANGES:
                self._untaken = [Change("", "missed")]
            self._passed.notify()

    def tell(self, record: JobRecord) -> None:
        """Hand over a job that was posted in this process: its change follows, and tells no more.

        So a job is handed to a worker without waiting for the reader.
        """
        with self._passed:
            # First: whatever the reader has passed on about the job came after its post.
            self._untaken.insert(0, Change(record.id, "state", record=record))
            self._passed.notify()

    def changes(self, after: str | None, *, wait_s: float) -> tuple[str, Sequence[Change]]:
        """Wait for changes, as `Records.changes` does; behind `after` is what was not taken yet."""
        with self._passed:
            if after is None:
                self._untaken.clear()
            elif not self._untaken:
                self._passed.wait(wait_s)
            taken, self._untaken = self._untaken, []
            return self._cursor, taken
