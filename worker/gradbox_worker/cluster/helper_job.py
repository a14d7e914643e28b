"""A job that another device leads, as it is open on this one, from one call to the next.

`JobInPhases` holds the model ready and the sums so far; `JobOfSamples` runs ranges each of which is
for itself. What they take and give is tensors; `device` has them as buffers.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from typing import Any, Protocol

from gradbox.protocol import JacobianSpec, PerSampleGradientSpec
from gradbox_engine import EngineError
from gradbox_engine.per_sample import SampleResult
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
from gradbox_worker.cluster.buffers import (
    FactorBuffers,
    TensorBuffer,
    as_buffers,
    as_tensors,
    num_bytes,
)
from gradbox_worker.cluster.row_outlet import RowOutlet
from gradbox_worker.computations.held_jobs import held
from gradbox_worker.computations.per_sample import sample_ranges
from gradbox_worker.device.warm_device import WarmDevice
from gradbox_worker.files.blob_tensors import Blobs
from gradbox_worker.files.rounded_gradients import Measured
from gradbox_worker.work import Supervision, Work


@dataclass(frozen=True)
class SharedBySamples:
    """What all ranges of a job are given: rows to multiply with, and tangents by parameter."""

    against: FactorBuffers | None = None
    vectors: Any = None


@dataclass(frozen=True)
class SampleAnswer:
    """What a range gave, as buffers; factors that stay on the device are not in it."""

    result: SampleResult
    factors: FactorBuffers | None
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
    """A job of a first pass and a replay, or of a first pass alone."""

    def _begin(self) -> None:
        self._sums: dict[int, NamedSums] = {}
        self._held = self._open.enter_context(held(self._job))

    def forward(self, part: Range) -> RangeOutputs:
        """Run the first pass of a range; see `HeldJob`."""
        return self._held.forward(part)

    def resume(self, part: Range, earlier: EarlierOutputs) -> None:
        """Hold a range whose outputs an earlier job returned; see `HeldJob`."""
        self._held.resume(part, earlier)

    def replay(self, part: Range, cotangents: RangeCotangents) -> RangeGradient:
        """Replay a range; its sums stay here, and the answer has the range's index for them."""
        found = self._held.replay(part, cotangents)
        assert isinstance(found.sums, dict)
        self._sums[part.index] = found.sums
        return replace(found, sums=part.index)

    def check(self, part: Range, norms: dict[str, NormStatistics]) -> int:
        """Check the range's first shard, and keep its graphs; see `HeldJob`."""
        return self._held.check(part, norms)

    def take_sums(self, index: int) -> NamedSums:
        """Give the sums of a range away."""
        return self._sums.pop(index)

    def add(self, index: int, other: Mapping[str, TensorBuffer]) -> int:
        """Add the sums of other ranges to those of a range; returns their number of bytes."""
        mine = self._sums[index]
        right = {
            name: b.tensor(copy=False).to(mine[name].device)
            if name in mine
            else b.tensor(copy=True)
            for name, b in other.items()
        }
        self._sums[index] = added(mine, right)
        return num_bytes(dict(other))


class JobOfSamples(HelperJob):
    """A per-sample job."""

    def _begin(self) -> None:
        spec = self._job.work.spec
        assert isinstance(spec, PerSampleGradientSpec | JacobianSpec)
        self._ranges = sample_ranges(self._job, spec)
        self._rows: dict[int, Factored] = {}

    def count(self, part: Range, *, of_others: bool) -> tuple[int, ...]:
        """Return how many samples each shard of a range has."""
        return self._ranges.count(part, of_others=of_others)

    def smaller(self, part: Range, task: SampleTask, shared: SharedBySamples) -> bool:
        """Return whether `form="auto"` keeps factors; see `SampleRanges`."""
        return self._ranges.smaller(part, self._here(task, shared))

    def run(self, part: Range, task: SampleTask, shared: SharedBySamples) -> SampleAnswer:
        """Compute a range; its rows stay here where the task says so."""
        try:
            found = self._ranges.run(part, self._here(task, shared))
        finally:
            self.outlet.end_wait()
        if isinstance(found.rows, Factored):
            self._rows[part.index] = found.rows
        factors = found.result.factors
        return SampleAnswer(
            as_buffers(replace(found.result, factors=None)),
            None if factors is None else FactorBuffers.of(factors),
            self._job.rounding.measured(),
            self.resumed,
        )

    def factors(self, index: int) -> FactorBuffers:
        """Return the rows of a range, which stay here too."""
        return FactorBuffers.of(self._rows[index])

    def gram(
        self, left: int | FactorBuffers, right: int | FactorBuffers | None, *, trace: bool
    ) -> TensorBuffer:
        """Return the Gram of two ranges' rows, one of which at least is held here."""
        return TensorBuffer.of(gram_of(self._factored(left), self._factored(right), trace=trace))

    def _factored(self, rows: int | FactorBuffers | None) -> Factored | None:
        if isinstance(rows, FactorBuffers):
            return rows.factored(self._job.device)
        return None if rows is None else self._rows[rows]

    def _here(self, task: SampleTask, shared: SharedBySamples) -> SampleTask:
        """Return a task with its tensors on this device."""
        device = self._job.device
        here: SampleTask = as_tensors(task, device=device)
        vectors = here.vectors
        if shared.vectors is not None:
            vectors = as_tensors(shared.vectors, device=device)
        against = None if shared.against is None else shared.against.factored(device)
        return replace(here, vectors=vectors, against=against)
