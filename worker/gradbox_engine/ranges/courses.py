"""Several courses of events at once, in one thread.

A course is a generator that yields the futures it waits for. So what happens to one range of a job,
with a device that is lost on the way, reads from top to bottom, and the others go on meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any, TypeVar

T = TypeVar("T")

Course = Generator[Future[Any], Any, T]

TICK_S = 1.0


def run_together(
    courses: Sequence[Course[T]], *, tick: Callable[[list[int]], None] = lambda _ended: None
) -> list[T]:
    """Run courses to their ends and return what each returned, in their order.

    Args:
        tick: called with the numbers of the courses that have ended, after each and about once a
            second; may raise to stop.

    Raises:
        Exception: what a course raised; the others are left where they are.
    """
    results: dict[int, T] = {}
    waiting: dict[Future[Any], int] = {}

    def go_on(number: int, step: Callable[[], Future[Any]]) -> None:
        try:
            waiting[step()] = number
        except StopIteration as end:
            results[number] = end.value
            tick(list(results))

    for number, course in enumerate(courses):
        go_on(number, lambda course=course: next(course))  # type: ignore[misc]
    while waiting:
        ended, _ = wait(waiting, timeout=TICK_S, return_when=FIRST_COMPLETED)
        tick(list(results))
        for future in [future for future in waiting if future in ended]:  # in one order
            number = waiting.pop(future)
            go_on(number, lambda n=number, f=future: _resume(courses[n], f))  # type: ignore[misc]
    return [results[number] for number in range(len(courses))]


def _resume(course: Course[Any], future: Future[Any]) -> Future[Any]:
    error = future.exception()
    return course.send(future.result()) if error is None else course.throw(error)
