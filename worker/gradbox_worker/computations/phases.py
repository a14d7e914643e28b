"""When each phase of a job began and ended, as the engine's observer and the worker hear it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Final, Protocol

from gradbox_engine import Observer
from gradbox_engine.requests import Phase

MODEL_LOAD: Final = "model load"
READ_INPUTS: Final = "read inputs"
WRITE_RESULT: Final = "write result"
# What the engine's phases are called to those who watch.
CALLED: Final[Mapping[Phase, str]] = {"forward": "first pass"}


class PhaseEnded(Protocol):
    """Told of a phase that ended; times are in seconds since 1970."""

    def __call__(self, phase: str, *, began_s: float, ended_s: float) -> None: ...


class PhaseClock:
    """An observer that stands before another one.

    The phase that runs when an error leaves the context ends with it.
    """

    def __init__(
        self,
        observer: Observer,
        ended: PhaseEnded | None,
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Be in no phase yet.

        Args:
            ended: None is told nothing.
            clock: returns seconds since 1970.
        """
        self._observer = observer
        self._ended = ended
        self._clock = clock
        self._phase = ""
        self._began_s = 0.0

    def __enter__(self) -> PhaseClock:
        return self

    def __exit__(self, *_: object) -> None:
        self.enter("")

    def enter(self, phase: str) -> None:
        """Begin a phase, which ends the one before it."""
        if self._ended is None or phase == self._phase:
            return
        now_s = self._clock()
        if self._phase:
            self._ended(self._phase, began_s=self._began_s, ended_s=now_s)
        self._phase, self._began_s = phase, now_s

    def step(self, phase: Phase, done: int, total: int) -> None:
        self.enter(CALLED.get(phase, phase))
        self._observer.step(phase, done, total)
