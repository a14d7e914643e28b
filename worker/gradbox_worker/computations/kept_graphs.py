"""Graphs of forward jobs that wait on the device for the gradient jobs that may name them.

A cache: a gradient job replays what is not here, and the result is the same. So graphs go

    when …                                                    which
    ────────────────────────────────────────────────────────  ──────────────────────────────────────
    a newer forward job needs their part of its `retain`      the oldest, one after the other
    a job begins that is no part of remote autograd           all
    a job begins on their model in another precision          those, see the engine's `kept_graphs`
    a model has to be loaded                                  all
    a job fails, is stopped, or runs out of memory            all
    nothing has run for `IDLE_S`                              all
    the gradient job at their cotangents has used them        those

Steps of several models, or of several forward jobs, thus keep what they need, in whatever order the
cotangents come. A plain `Forward` has `retain` 0 and keeps nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from gradbox.protocol import (
    CotangentsLoss,
    ForwardSpec,
    GradientSpec,
    JobSpec,
    RunOptions,
    SharedSpec,
    StateRef,
    StepSpec,
    option_names,
)
from gradbox_engine import KeptPass
from gradbox_engine.ranges import GraphsBetweenJobs, Range
from gradbox_engine.replay.shard_record import ShardRecord
from gradbox_worker.work import Work

IDLE_S: Final = 60.0

# What a gradient job says for itself; all else is its forward job's.
OWN: Final = option_names(RunOptions) | {"protocol", "model"}


@dataclass(frozen=True)
class _Entry:
    """One forward job's graphs, or those of a range of its shards.

    `shards` are where a range begins and ends; None if one device ran them all.
    """

    work: Work
    shards: tuple[int, int] | None
    kept: KeptPass


class KeptGraphs:
    """The graphs kept in one device process, oldest first."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        """Hold nothing.

        Args:
            clock: returns seconds.
        """
        self._entries: list[_Entry] = []
        self._clock = clock
        self._resting_since = clock()

    @property
    def num_bytes(self) -> float:
        """What they take, about; 0 once there are none."""
        return sum(entry.kept.num_bytes for entry in self._entries)

    @property
    def newest_bytes(self) -> int:
        """Saved tensors of the shard that was kept last."""
        return self._entries[-1].kept.newest_bytes if self._entries else 0

    @property
    def records(self) -> list[ShardRecord]:
        """All shards that have, or had, a graph here."""
        return [record for entry in self._entries for record in entry.kept.records]

    def begin(self, work: Work, *, loaded: bool) -> None:
        """Make way for a job.

        Args:
            loaded: whether its model is on the device already.
        """
        if not (loaded and _is_of_remote_autograd(work.spec)):
            self.drop()
        self._entries = [
            entry
            for entry in self._entries
            if entry.work.model != work.model or entry.work.spec.precision == work.spec.precision
        ]

    def keep(self, work: Work, kept: KeptPass, *, shards: tuple[int, int] | None = None) -> None:
        """Keep what a forward job left, or a range of it."""
        self._entries.append(_Entry(work, shards, kept))

    def of(self, work: Work, *, shards: tuple[int, int] | None = None) -> KeptPass | None:
        """Return what the forward job that a job's cotangents belong to left, if it is here.

        Args:
            shards: of the range that it left it of.
        """
        for entry in self._entries:
            left = entry.work
            same = (
                # The path tells the job, and the attempt at it whose outputs these are.
                (left.result_path, entry.shards) == (work.earlier_result, shards)
                and (left.model, left.model_version) == (work.model, work.model_version)
                and _terms(left.spec) == _terms(work.spec)
            )
            if same:
                return entry.kept
        return None

    def between_jobs(self, work: Work) -> GraphsBetweenJobs:
        """Return the graphs that wait here, as the engine asks for those of a job's ranges."""

        def shards(part: Range) -> tuple[int, int] | None:
            return None if part.is_whole else (part.start, part.stop)

        return GraphsBetweenJobs(
            of=lambda part: self.of(work, shards=shards(part)),
            keep=lambda part, kept: self.keep(work, kept, shards=shards(part)),
            older=self,
            records=lambda: self.records,
        )

    def free_oldest(self) -> None:
        """Free one shard's graph, if there is any."""
        self._forget_empty()
        if self._entries:
            self._entries[0].kept.free_one()
            self._forget_empty()

    def drop(self) -> None:
        """Free all graphs."""
        self._entries.clear()

    def rest(self) -> None:
        """Note that a job has ended and its graphs may have been used."""
        self._forget_empty()
        self._resting_since = self._clock()

    def idle_left_s(self) -> float | None:
        """Return how long they may still lie here without a job; None if there are none."""
        if not self._entries:
            return None
        return max(0.0, self._resting_since + IDLE_S - self._clock())

    def _forget_empty(self) -> None:
        self._entries = [entry for entry in self._entries if entry.kept.num_kept]


def _is_of_remote_autograd(spec: JobSpec) -> bool:
    """Return whether a job is one of the two halves of remote autograd."""
    if isinstance(spec, GradientSpec | StepSpec):
        return isinstance(spec.loss, CotangentsLoss)
    return isinstance(spec, ForwardSpec)


def _terms(spec: JobSpec) -> dict[str, Any]:
    terms = {field: getattr(spec, field) for field in set(SharedSpec.model_fields) - OWN}
    if isinstance(spec, StepSpec):  # whose forward job ran on the state before it
        terms["state"] = StateRef(run=spec.run, step=spec.number - 1)
    return terms
