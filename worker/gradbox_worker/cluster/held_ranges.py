"""The ranges of a job that a device has, from one call to the next: the leader, or a helper.

`RangesInPhases` holds the model ready and the sums so far; in `RangesOfSamples` each range is for
itself. The leader calls both by the names of methods, its own at once and those of a helper by way
of `ClusterDevice.call`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from gradbox.protocol import JacobianSpec, PerSampleGradientSpec
from gradbox_engine.per_sample import SampleResult
from gradbox_engine.per_sample.planned_model import Plans
from gradbox_engine.ranges import (
    EarlierOutputs,
    HeldJob,
    NamedSums,
    NormStatistics,
    Range,
    RangeCotangents,
    RangeGradient,
    RangeOutputs,
    added,
)
from gradbox_engine.ranges.samples import SampleRanges, SampleTask
from gradbox_engine.ranges.samples.sample_ranges import gram_of
from gradbox_factors import Factored
from gradbox_worker.cluster.buffers import num_bytes
from gradbox_worker.computations.held_jobs import held
from gradbox_worker.computations.job import LoadedJob
from gradbox_worker.computations.per_sample import sample_ranges
from gradbox_worker.files.rounded_gradients import Measured, RoundedGradients
from gradbox_worker.stores.rows import RowBlock
from gradbox_worker.stores.scoring import Question, Scores, scores_of


@contextmanager
def opened(job: LoadedJob) -> Iterator[RangesInPhases | RangesOfSamples]:
    """Hold a job ready on a device that another one leads.

    Raises:
        GradboxError, EngineError: as for the whole job.
    """
    spec = job.work.spec

    def resumed() -> int:
        return job.checkpoints.resumed

    if isinstance(spec, PerSampleGradientSpec | JacobianSpec):
        yield RangesOfSamples(sample_ranges(job, spec), job.rounding, resumed)
    else:
        with held(job) as ready:
            yield RangesInPhases(ready, resumed)


class RangesInPhases:
    """Ranges of a first pass and a replay, or of a first pass alone; see `HeldJob`."""

    def __init__(self, ready: HeldJob, resumed: Callable[[], int]) -> None:
        """Have no range yet.

        Args:
            resumed: returns how often a range went on from a checkpoint here.
        """
        self._ready, self._resumed = ready, resumed
        self._sums: dict[int, NamedSums] = {}

    def forward(self, part: Range) -> tuple[RangeOutputs, int]:
        """Run the first pass of a range; returns also how often one went on from a checkpoint."""
        return self._ready.forward(part), self._resumed()

    def resume(self, part: Range, earlier: EarlierOutputs) -> int:
        """Hold a range whose outputs an earlier job returned; returns the same."""
        self._ready.resume(part, earlier)
        return self._resumed()

    def replay(self, part: Range, cotangents: RangeCotangents) -> RangeGradient:
        """Replay a range; its sums stay here, and the answer has the range's index for them."""
        found = self._ready.replay(part, cotangents)
        assert isinstance(found.sums, dict)
        self._sums[part.index] = found.sums
        return replace(found, sums=part.index)

    def check(self, part: Range, norms: dict[str, NormStatistics]) -> int:
        """Check the range's first shard, and keep its graphs."""
        return self._ready.check(part, norms)

    def take_sums(self, index: int) -> NamedSums:
        """Give the sums of a range away."""
        return self._sums.pop(index)

    def add(self, index: int, other: NamedSums) -> int:
        """Add the sums of other ranges, not to be written to, to a range's; returns their bytes."""
        mine = self._sums[index]
        right = {name: x if name in mine else x.clone() for name, x in other.items()}
        self._sums[index] = added(mine, right)
        return num_bytes(other)


@dataclass(frozen=True)
class SharedBySamples:
    """What all ranges of a job are given: plans, rows to multiply with, tangents by parameter."""

    plans: Plans
    against: Factored | None
    vectors: Any


@dataclass(frozen=True)
class SampleAnswer:
    """What a range gave; factors that stay on the device are not in it."""

    result: SampleResult
    rounded: Measured
    resumed: int  # how often a range went on from a checkpoint


class RangesOfSamples:
    """Ranges of a per-sample job; see `SampleRanges`."""

    def __init__(
        self, ranges: SampleRanges, rounding: RoundedGradients, resumed: Callable[[], int]
    ) -> None:
        """Have no rows yet.

        Args:
            rounding: of this device's rows.
            resumed: as for `RangesInPhases`.
        """
        self._ranges, self._rounding, self._resumed = ranges, rounding, resumed
        self._rows: dict[int, Factored] = {}

    def plans(self, shards: Sequence[int], of_others: bool) -> Plans:
        """Return plans for the shapes of some shards, for all devices."""
        return self._ranges.plans(shards, of_others=of_others)

    def smaller(self, part: Range, task: SampleTask, shared: SharedBySamples) -> bool:
        """Return whether `form="auto"` keeps factors."""
        return self._ranges.smaller(part, _with(task, shared))

    def run(self, part: Range, task: SampleTask, shared: SharedBySamples) -> SampleAnswer:
        """Compute a range; its rows stay here where the task says so."""
        found = self._ranges.run(part, _with(task, shared))
        if isinstance(found.rows, Factored):
            self._rows[part.index] = found.rows
        return SampleAnswer(found.result, self._rounding.measured(), self._resumed())

    def scored(self, question: Question, blocks: Sequence[RowBlock]) -> Scores:
        """Return what is asked of a store's rows, of some of its blocks."""
        return scores_of(question, blocks, self._ranges.observer)

    def factors(self, index: int) -> Factored:
        """Return the rows of a range, which stay here too."""
        return self._rows[index]

    def gram(
        self, left: int | Factored, right: int | Factored | None, trace: bool
    ) -> tuple[Tensor, int]:
        """Return the Gram of two ranges' rows, and the bytes of those that are not held here."""
        sides = [self._rows[rows] if isinstance(rows, int) else rows for rows in (left, right)]
        return gram_of(sides[0], sides[1], trace=trace), num_bytes([left, right])


def _with(task: SampleTask, shared: SharedBySamples) -> SampleTask:
    vectors = task.vectors if shared.vectors is None else shared.vectors
    return replace(task, plans=shared.plans, vectors=vectors, against=shared.against)
