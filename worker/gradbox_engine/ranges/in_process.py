"""All ranges of a job on one device, one after the other.

It defines what the same ranges on many devices have to return, and is for tests: on one device,
`set_gradient` needs no second range.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from typing import Any, Protocol, Unpack

from torch import nn

from gradbox_engine.model.prepared import model_device
from gradbox_engine.ranges.held_job import held_job
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
from gradbox_engine.ranges.split_set_gradient import SplitGradient, split_set_gradient
from gradbox_engine.replay.set_gradient import GRADS_ALONE
from gradbox_engine.requests import CallKeywords, Group, Objective, Observer, Retain, Returned


class Held(Protocol):
    """A job that is held open on a device: `HeldJob`, or one of its kind; see `RangeDevice`."""

    def forward(self, part: Range) -> RangeOutputs:
        """Run the first phase of a range."""

    def resume(self, part: Range, earlier: EarlierOutputs) -> None:
        """Hold a range in place of that."""

    def check(self, part: Range, norms: dict[str, NormStatistics]) -> int:
        """Check a range that has no second phase."""

    def replay(self, part: Range, cotangents: RangeCotangents) -> RangeGradient:
        """Run the second phase of a range."""


class OneDevice:
    """One held job that takes every range; what is asked for is done at once."""

    def __init__(self, job: Held) -> None:
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


def done(function: Callable[..., Any], *arguments: Any) -> Future[Any]:
    """Call a function and return its result as a future that has ended."""
    future: Future[Any] = Future()
    future.set_result(function(*arguments))
    return future


def set_gradient_in_ranges(
    model: nn.Module,
    parts: Sequence[Range],
    groups: Sequence[Group],
    objective: Objective,
    *,
    wrt: Sequence[str] | None = None,
    retain: Retain = 0,
    returns: Collection[Returned] = GRADS_ALONE,
    observer: Observer | None = None,
    **options: Unpack[CallKeywords],
) -> SplitGradient:
    """Return what `set_gradient` does, computed in ranges on one device; see there and `cut`."""
    with held_job(
        model,
        groups,
        wrt=wrt,
        loss_parameters=objective.parameters,
        retain=retain,
        returns=returns,
        observer=observer,
        **options,
    ) as job:
        return split_set_gradient(
            OneDevice(job),
            parts,
            groups,
            objective,
            returns=returns,
            device=model_device(model),
            **options,
        )
