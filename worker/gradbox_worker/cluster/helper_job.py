"""A job that another device leads, as it is open on this one, from one call to the next.

`JobInPhases` holds the model ready and the sums so far; `JobOfSamples` runs ranges each of which is
for itself. The leader calls their methods by name, see `ClusterDevice.call`.
"""

from __future__ import annotations

from collections.abc import Collection
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from typing import Any, Protocol

from torch import Tensor

from gradbox.protocol import JacobianSpec, PerSampleGradientSpec
from gradbox_engine import EngineError
from gradbox_engine.per_sample import SampleResult
from gradbox_engine.per_sample.planned_model import Plans
from gradbox_engine.per_sample.planning.model import Shapes
from gradbox_engine.ranges import (
    EarlierOutputs,
    NamedSums,
    NormStatistics,
    Range,
    RangeCotangents,
    RangeGradient,
    RangeOutputs,
    added,
)
from gradbox_engine.ranges.samples import SampleTask
from gradbox_engine.ranges.samples.sample_ranges import gram_of
from gradbox_factors import Factored
from gradbox_worker.cluster.buffers import num_bytes
from gradbox_worker.cluster.row_outlet import RowOutlet
from gradbox_worker.computations.held_jobs import held
from gradbox_worker.computations.per_sample import sample_ranges
from gradbox_worker.device.warm_device import WarmDevice
from gradbox_worker.files.blob_tensors import Blobs
from gradbox_worker.files.rounded_gradients import Measured
from gradbox_worker.work import Supervision, Work


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
    resumed: int  # how often the range went on from a checkpoint


class Watched(Supervision, Protocol):
    """Who watches a job on this device."""

    def check(self) -> None:
        """Raise `StopNow` if the job is to stop."""


class HelperJob:
    """What both kinds of jobs have: the model and the inputs, until the job is closed.

    Attributes:
        outlet: where dense rows of this device go.
    """

    def __init__(
        self,
        device: WarmDevice,
        work: Work,
        watched: Watched,
        *,
        rows_name: str,
        blobs: Blobs | None,
    ) -> None:
        """Make ready for ranges.

        Args:
            watched: hears of its shards, and raises `StopNow` once it is to stop.
            rows_name: see `RowOutlet`.
            blobs: where the inputs are; None: in the box's data folder.

        Raises:
            GradboxError, EngineError: as for the whole job.
        """
        self.outlet = RowOutlet(while_waiting=watched.check, kept_as=rows_name)
        self._kept, self._open = device.kept, ExitStack()
        try:
            self._job = self._open.enter_context(
                device.helping(work, watched, rows=self.outlet, blobs=blobs)
            )
            self._begin()
        except BaseException:
            self.close()
            raise

    def _begin(self) -> None:
        raise NotImplementedError

    def close(self) -> None:
        """Put the model back, in the thread that opened it, and drop what is held here."""
        self.outlet.close()
        # What the engine refuses on the way out a range has refused before, or the job has failed.
        with suppress(EngineError):
            self._open.close()
        self._kept.rest()

    @property
    def resumed(self) -> int:
        """How often a range here went on from a checkpoint."""
        return self._job.checkpoints.resumed


class JobInPhases(HelperJob):
    """A job of a first pass and a replay, or of a first pass alone; see `HeldJob`."""

    def _begin(self) -> None:
        self._sums: dict[int, NamedSums] = {}
        self._held = self._open.enter_context(held(self._job))

    def forward(self, part: Range) -> tuple[RangeOutputs, int]:
        """Run the first pass of a range; returns also how often it went on from a checkpoint."""
        return self._held.forward(part), self.resumed

    def resume(self, part: Range, earlier: EarlierOutputs) -> int:
        """Hold a range whose outputs an earlier job returned; returns the same."""
        self._held.resume(part, earlier)
        return self.resumed

    def replay(self, part: Range, cotangents: RangeCotangents) -> RangeGradient:
        """Replay a range; its sums stay here, and the answer has the range's index for them."""
        found = self._held.replay(part, cotangents)
        assert isinstance(found.sums, dict)
        self._sums[part.index] = found.sums
        return replace(found, sums=part.index)

    def check(self, part: Range, norms: dict[str, NormStatistics]) -> int:
        """Check the range's first shard, and keep its graphs."""
        return self._held.check(part, norms)

    def take_sums(self, index: int) -> NamedSums:
        """Give the sums of a range away."""
        return self._sums.pop(index)

    def add(self, index: int, other: NamedSums) -> int:
        """Add the sums of other ranges, not to be written to, to a range's; returns their bytes."""
        mine = self._sums[index]
        right = {name: x if name in mine else x.clone() for name, x in other.items()}
        self._sums[index] = added(mine, right)
        return num_bytes(other)


class JobOfSamples(HelperJob):
    """A per-sample job; see `SampleRanges`."""

    def _begin(self) -> None:
        spec = self._job.work.spec
        assert isinstance(spec, PerSampleGradientSpec | JacobianSpec)
        self._ranges = sample_ranges(self._job, spec)
        self._rows: dict[int, Factored] = {}

    def plans(self, part: Range, shapes: Collection[Shapes], of_others: bool) -> Plans:
        """Return plans for shapes that the range's shards have, for all devices."""
        return self._ranges.plans(part, shapes, of_others=of_others)

    def smaller(self, part: Range, task: SampleTask, shared: SharedBySamples) -> bool:
        """Return whether `form="auto"` keeps factors."""
        return self._ranges.smaller(part, _with(task, shared))

    def run(self, part: Range, task: SampleTask, shared: SharedBySamples) -> SampleAnswer:
        """Compute a range; its rows stay here where the task says so."""
        try:
            found = self._ranges.run(part, _with(task, shared))
        finally:
            self.outlet.end_wait()
        if isinstance(found.rows, Factored):
            self._rows[part.index] = found.rows
        return SampleAnswer(found.result, self._job.rounding.measured(), self.resumed)

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
