"""A thread of the service that does one thing again and again until it is closed."""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from typing import Self

log = logging.getLogger(__name__)


class RepeatingThread(ABC):
    """Calls `_step` from `start` to `close`; a step that raises is logged and tried again.

    `start`, `close` and `join` belong to the app's lifespan. A step waits by `_stopping.wait`, so
    that `close` ends the wait.
    """

    def __init__(self, name: str, *, failed_pause_s: float = 1.0) -> None:
        """Start nothing yet.

        Args:
            name: of the thread, behind "gradbox-".
            failed_pause_s: how long to wait after a step that raised.
        """
        self._name = name
        self._failed_pause_s = failed_pause_s
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"gradbox-{name}", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def close(self) -> None:
        """Ask it to stop; `join` waits until it has. May be called twice."""
        self._stopping.set()

    def join(self) -> None:
        """Wait until it has stopped."""
        self._thread.join()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
        self.join()

    @property
    def alive(self) -> bool:
        """Whether it runs."""
        return self._thread.is_alive()

    @abstractmethod
    def _step(self) -> None:
        """Act once, and wait until it is time for the next step."""

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                self._step()
            except Exception:  # a mistake of ours in one step must not end all later ones
                log.exception("the %s failed; trying again", self._name)
                self._stopping.wait(self._failed_pause_s)
