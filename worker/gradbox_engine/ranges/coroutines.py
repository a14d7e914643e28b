"""Calls to several devices at once, from one thread.

A coroutine here is a generator that yields the futures it waits for. So what happens to one range
of a job, with a device that is lost on the way, reads from top to bottom, and the others go on
meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any, TypeVar

from gradbox_engine.errors import DeviceLost
from gradbox_engine.ranges.protocol import Range

D = TypeVar("D")
T = TypeVar("T")

Coroutine = Generator[Future[Any], Any, T]

TICK_S = 1.0

MOST_LOST = 3
"""Devices that one range may lose: what ended these would end the next one, too."""


class LostDevices:
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


def on_some_device(
    part: Range,
    take: Callable[[Range], D],
    call: Callable[[D, Range], Future[T]],
    lost: LostDevices,
) -> Coroutine[T]:
    """Make a call for a range that needs nothing of any call before it.

    Args:
        take: returns a device for a range, again where the last one was lost.

    Raises:
        DeviceLost: no device is left, or the range has lost too many.
    """
    while True:
        device = take(part)
        try:
            answer: T = yield call(device, part)
        except DeviceLost as error:
            lost.count(part, error)
        else:
            return answer


def run_together(
    coroutines: Sequence[Coroutine[T]], *, tick: Callable[[list[int]], None] = lambda _ended: None
) -> list[T]:
    """Run coroutines to their ends and return what each returned, in their order.

    Args:
        tick: called with the numbers of those that have ended, after each and about once a
            second; may raise to stop.

    Raises:
        Exception: what a coroutine raised; the others are left where they are.
    """
    results: dict[int, T] = {}
    waiting: dict[Future[Any], int] = {}

    def go_on(number: int, step: Callable[[], Future[Any]]) -> None:
        try:
            future = step()
            while future.done():
                future = _resume(coroutines[number], future)
            waiting[future] = number
        except StopIteration as end:
            results[number] = end.value
            tick(list(results))

    for number, coroutine in enumerate(coroutines):
        go_on(number, lambda coroutine=coroutine: next(coroutine))  # type: ignore[misc]
    while waiting:
        ended, _ = wait(waiting, timeout=TICK_S, return_when=FIRST_COMPLETED)
        tick(list(results))
        for future in [future for future in waiting if future in ended]:  # in one order
            number = waiting.pop(future)
            go_on(number, lambda n=number, f=future: _resume(coroutines[n], f))  # type: ignore[misc]
    return [results[number] for number in range(len(coroutines))]


def _resume(coroutine: Coroutine[Any], future: Future[Any]) -> Future[Any]:
    error = future.exception()
    return coroutine.send(future.result()) if error is None else coroutine.throw(error)
