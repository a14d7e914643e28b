"""All ranges of a job on one device, one after the other, with nothing copied between phases.

It is how a job runs on one device, most often in one range; and it defines what the same ranges on
many devices have to return.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from gradbox_engine.model.calling.shard_feed import all_positions
from gradbox_engine.ranges.held_job import HeldJob
from gradbox_engine.ranges.protocol import (
    EarlierOutputs,
    NamedSums,
    NormStatistics,
    Range,
    RangeCotangents,
    RangeDevice,
    RangeGradient,
    RangeOutputs,
    Sums,
)
from gradbox_engine.ranges.reduction import added
from gradbox_engine.requests import Group, Phase, Precision

T = TypeVar("T")


class OneDevice:
    """One held job that takes every range; what is asked for is done at once."""

    def __init__(self, job: HeldJob) -> None:
        self._job = job

    def take(self, part: Range) -> RangeDevice:
        """Return this device, for any range."""
        return self

    def forward(self, part: Range) -> Future[RangeOutputs]:
        """See `HeldJob.forward`."""
        return done(self._job.forward, part)

    def replay(self, part: Range, cotangents: RangeCotangents) -> Future[RangeGradient]:
        """See `HeldJob.replay`."""
        return done(self._job.replay, part, cotangents)

    def resume(self, part: Range, earlier: EarlierOutputs) -> Future[None]:
        """See `HeldJob.resume`."""
        return done(self._job.resume, part, earlier)

    def check(self, part: Range, norms: dict[str, NormStatistics]) -> Future[int]:
        """See `HeldJob.check`."""
        return done(self._job.check, part, norms)

    def added(self, left: Sums, right: Sums) -> Future[Sums]:
        """See `reduction.added`."""
        return done(added, left, right)

    def fetched(self, sums: Sums) -> Future[NamedSums]:
        """Return them, for they are here."""
        return done(lambda: sums)

    def between_phases(self, step: Callable[[], T], precision: Precision) -> T:
        """Run a step as the model's calls do, and without kept graphs where memory runs out."""
        return self._job.freeing_graphs(step)

    def tick(self, phase: Phase, done: int, total: int) -> None:
        """Do nothing: the job's observer hears of each shard."""


def done(function: Callable[..., Any], *arguments: Any) -> Future[Any]:
    """Call a function and return its result as a future that has ended."""
    future: Future[Any] = Future()
    future.set_result(function(*arguments))
    return future


def one_range(groups: Sequence[Group]) -> tuple[Range, ...]:
    """Return all shards of a job as its only range."""
    return (Range(0, 1, 0, len(all_positions(groups))),)
