"""One call for each range, on whichever device; and how many devices a range may lose."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from gradbox_engine.errors import DeviceLost
from gradbox_engine.ranges.courses import Course, run_together
from gradbox_engine.ranges.protocol import Range

D = TypeVar("D")
T = TypeVar("T")

MOST_LOST = 3
"""Devices that one range may lose: what ended these would end the next one, too."""


class Losses:
    """How many devices each range has lost."""

    def __init__(self) -> None:
        self._counts: dict[Range, int] = {}

    def of(self, part: Range) -> int:
        """Return how many a range has lost."""
        return self._counts.get(part, 0)

    def count(self, part: Range, error: DeviceLost) -> None:
        """Count one more.

        Raises:
            DeviceLost: it is one too many.
        """
        self._counts[part] = self.of(part) + 1
        if self._counts[part] >= MOST_LOST:
            raise DeviceLost(
                f"shards {part.start} to {part.stop - 1}: expected one of {MOST_LOST} devices to "
                f"live through them, but all were lost, the last one so: {error}"
            ) from error


def on_each(
    parts: Sequence[Range],
    take: Callable[[Range], D],
    call: Callable[[D, Range], Future[Any]],
    losses: Losses,
    *,
    tick: Callable[[list[int]], None] = lambda _ended: None,
) -> list[Any]:
    """Make a call for each range that needs nothing of any before it; return what they returned.

    Args:
        take: returns a device for a range, again where the last one was lost.

    Raises:
        DeviceLost: no device is left, or one range has lost too many.
    """

    def course(part: Range) -> Course[Any]:
        while True:
            try:
                return (yield call(take(part), part))
            except DeviceLost as error:
                losses.count(part, error)

    return run_together([course(part) for part in parts], tick=tick)
