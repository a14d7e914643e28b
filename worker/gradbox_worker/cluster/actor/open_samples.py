"""A per-sample job that is open on one device: each call runs a range of it, and is for itself."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

from gradbox.protocol import JacobianSpec, PerSampleGradientSpec
from gradbox_engine import Observer
from gradbox_engine.per_sample.request import Request, SampleResult
from gradbox_engine.ranges import Range
from gradbox_engine.ranges.samples import SampleRanges, SampleTask
from gradbox_engine.ranges.samples.sample_ranges import gram_of
from gradbox_factors import Factored
from gradbox_worker.cluster.actor.open_job import ReceivedJob
from gradbox_worker.cluster.actor.range_checkpoints import RangeCheckpoints
from gradbox_worker.cluster.actor.row_outlet import RowOutlet
from gradbox_worker.cluster.exchange.array_buffers import TensorBuffer, as_buffers, as_tensors
from gradbox_worker.cluster.exchange.factor_buffers import FactorBuffers
from gradbox_worker.cluster.exchange.sent_tensors import RangeJob
from gradbox_worker.computations.dense_rows import DenseSink, Progress
from gradbox_worker.computations.engine_inputs import build_function, input_groups
from gradbox_worker.computations.memory import default_result_memory_bytes
from gradbox_worker.computations.per_sample import (
    ENGINE_SHARE,
    how_called,
    rows_go_to_file,
    sample_groups,
)
from gradbox_worker.device.warm_device import WarmDevice
from gradbox_worker.files.rounded_gradients import Measured, RoundedGradients


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


class OpenSamples:
    """A per-sample job on this device."""

    def __init__(self, device: WarmDevice, job: RangeJob, *, observer: Observer) -> None:
        """Make ready for ranges.

        Raises:
            GradboxError, EngineError: as for the whole job.
        """
        received = ReceivedJob.of(job, device)
        spec = job.work.spec
        assert isinstance(spec, PerSampleGradientSpec | JacobianSpec)
        self.weights_widened = received.weights_widened
        self._sent, self._device = received.tensors, received.device
        groups = input_groups(spec, received.loaded.methods, received.tensors)
        rows, others = sample_groups(groups, spec)
        loss = None
        if isinstance(spec, PerSampleGradientSpec):
            loss = build_function(
                spec.loss.function,
                received.tensors,
                device=received.device,
                widened=spec.widened,
            ).function
        progress = Progress(observer)
        self._rounding = RoundedGradients(spec.transfer)
        self.outlet = RowOutlet(while_waiting=progress.repeat, kept_as=job.rows)
        self._checkpoints = RangeCheckpoints(
            job, devices=received.loaded.devices, rows=self.outlet, rounding=self._rounding
        )
        sink = None
        if rows_go_to_file(spec):
            sink = DenseSink(self.outlet, self._rounding, progress, squeezed=loss is not None)
        budget_bytes = device.result_memory_bytes or default_result_memory_bytes(received.device)
        self._ranges = SampleRanges(
            received.loaded.module,
            [rows] if others is None else [rows, others],
            request_of(spec),
            loss=loss,
            observer=progress,
            budget_bytes=int(budget_bytes * ENGINE_SHARE),
            sink=sink,
            checkpoints=self._checkpoints.of_samples,
            **how_called(spec, received.calls),
        )
        self._rows: dict[int, Factored] = {}
        self._open = ExitStack()
        self._open.enter_context(device.limit.held())

    def close(self) -> None:
        """Drop what is held here."""
        self._rows.clear()
        self.outlet.close()
        self._open.close()

    def count(self, part: Range, blocks: Sequence[Any], *, of_others: bool) -> tuple[int, ...]:
        """Return how many samples each shard of a range has."""
        self._sent.receive(blocks)
        return self._ranges.count(part, of_others=of_others)

    def smaller(
        self, part: Range, task: SampleTask, shared: SharedBySamples, blocks: Sequence[Any]
    ) -> bool:
        """Return whether `form="auto"` keeps factors; see `SampleRanges`."""
        self._sent.receive(blocks)
        return self._ranges.smaller(part, self._here(task, shared))

    def run(
        self, part: Range, task: SampleTask, shared: SharedBySamples, blocks: Sequence[Any]
    ) -> SampleAnswer:
        """Compute a range; its rows stay here where the task says so."""
        self._sent.receive(blocks)
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
            self._rounding.measured(),
            self._checkpoints.resumed(part.index),
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
            return rows.factored(self._device)
        return None if rows is None else self._rows[rows]

    def _here(self, task: SampleTask, shared: SharedBySamples) -> SampleTask:
        """Return a task with its tensors on this device."""
        here: SampleTask = as_tensors(task, device=self._device)
        vectors = here.vectors
        if shared.vectors is not None:
            vectors = as_tensors(shared.vectors, device=self._device)
        against = None if shared.against is None else shared.against.factored(self._device)
        return replace(here, vectors=vectors, against=against)


def request_of(
    spec: PerSampleGradientSpec | JacobianSpec,
    *,
    vectors: Any = None,
    against: Factored | None = None,
) -> Request:
    """Return what a job asks for, as the engine takes it, but for what a range's task says."""
    return Request(
        reduce=spec.reduce,
        form=spec.form,
        clip=spec.clip if isinstance(spec, PerSampleGradientSpec) else None,
        dim=spec.dim,
        seed=spec.seed,
        vectors=vectors,
        against=against,
        kind=spec.kind,
    )
