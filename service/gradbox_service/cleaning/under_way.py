"""Jobs that are being posted: what one names is not needed yet, and is not to be removed.

Of one owner, either jobs are posted, any number at a time, or files are removed because only ended
jobs needed them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Condition


class UnderWay:
    """Knows who posts jobs now, and of whose files some are removed. Any thread may call it."""

    def __init__(self) -> None:
        self._changed = Condition()
        self._num_posted = Counter[str]()  # by owner
        self._removing = set[str]()

    @contextmanager
    def posting(self, owner: str) -> Iterator[None]:
        """Keep what the owner has, while a job that names some of it is checked and queued."""
        with self._changed:
            self._changed.wait_for(lambda: owner not in self._removing)
            self._num_posted[owner] += 1
        try:
            yield
        finally:
            with self._changed:
                self._num_posted[owner] -= 1
                self._changed.notify_all()

    @contextmanager
    def removing(self, owner: str) -> Iterator[None]:
        """Let no job of the owner be posted meanwhile; those that are go first."""
        with self._changed:
            self._changed.wait_for(lambda: owner not in self._removing)
            self._removing.add(owner)
            self._changed.wait_for(lambda: not self._num_posted[owner])
        try:
            yield
        finally:
            with self._changed:
                self._removing.remove(owner)
                self._changed.notify_all()
