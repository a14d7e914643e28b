"""A per-sample job on one device: any range of it, each call a job with a checkpoint of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from gradbox_engine.checkpoint import Checkpoints
from gradbox_engine.model.calling.shard_feed import Position
from gradbox_engine.per_sample.job import BUDGET_BYTES, PerSampleJob
from gradbox_engine.per_sample.pieces import Piece, Sink
from gradbox_engine.per_sample.planned_model import PlannedModel, Plans
from gradbox_engine.per_sample.planning.model import (
    CallableModel,
    Shapes,
    callable_model,
    form_of,
    shapes_of,
)
from gradbox_engine.per_sample.request import Request, SampleResult
from gradbox_engine.ranges.protocol import Range
from gradbox_engine.ranges.samples.protocol import RangeSamples, Rows, SampleTask
from gradbox_engine.requests import Group, Observer, Silent
from gradbox_factors import Factored


class SampleRanges:
    """What a device needs to run ranges of a per-sample job.

    What is not described is as for `per_sample_gradient`, and the same on every device. Of shards
    outside of its ranges a device reads those that it plans; the leader asks for the shapes of all.

    Attributes:
        observer: hears of this device's samples.
    """

    def __init__(
        self,
        model: nn.Module,
        groups: Sequence[Group],
        request: Request,
        *,
        loss: Callable[..., Tensor] | None = None,
        observer: Observer | None = None,
        budget_bytes: int = BUDGET_BYTES,
        sink: Sink | None = None,
        check_number: float = 0.0,
        checkpoints: Callable[[Range, SampleTask], Checkpoints | None] = lambda *_: None,
        **setting: Any,
    ) -> None:
        """Take the job.

        Args:
            groups: the job's own shards, and the other shards that rows are multiplied with.
            request: of the whole job; what a `SampleTask` says goes before it.
            loss: None for a Jacobian.
            sink: takes the dense rows of this device's ranges, at their places in the whole job.
            checkpoints: where the state of a range is written, and read when it begins again.
        """
        self._model, self._groups, self._setting = model, groups, setting
        self._request, self._loss = request, loss
        self.observer, self._budget_bytes, self._sink = observer or Silent(), budget_bytes, sink
        self._checkpoints, self._check_number = checkpoints, check_number

    def shapes(self, part: Range, *, of_others: bool) -> list[Shapes]:
        """Return what plans depend on of each shard of a range."""
        positions = _positions(part, of_others=of_others)
        return [shapes_of(form_of(self._groups[p.group].shards, p.shard)) for p in positions]

    def plans(self, shards: Sequence[int], *, of_others: bool) -> Plans:
        """Return plans for the shapes of some shards, made where there are none yet.

        Raises:
            NoBatchAxis, CoupledSamples: there is none.
        """
        with self._ready() as ready:
            positions = [Position(int(of_others), shard) for shard in shards]
            return PlannedModel(ready).for_others(positions)

    def count(self, parts: Sequence[Range], plans: Plans, *, of_others: bool) -> list[int]:
        """Return how many samples each range has.

        Raises:
            NoBatchAxis: a shard has none.
        """
        with self._ready() as ready:
            planned = PlannedModel(ready)
            planned.learn(int(of_others), plans)
            return [
                sum(map(planned.count, _positions(part, of_others=of_others))) for part in parts
            ]

    def smaller(self, part: Range, task: SampleTask) -> bool:
        """Return whether `form="auto"` keeps factors, by a range's first shard and B of the job."""
        first = replace(part, stop=part.start + 1)
        asked = replace(task, form="auto", keep_rows=False)
        return self._run(first, asked, _Nowhere(), None).factors is not None

    def run(self, part: Range, task: SampleTask) -> RangeSamples:
        """Compute a range.

        Raises:
            EngineError: see `per_sample_gradient`.
        """
        dense = task.reduce == "none" and task.form == "dense" and not task.of_others
        sink = None
        if dense and self._sink is not None:
            sink = OffsetSink(self._sink, task.first_sample, task.num_samples)
        result = self._run(part, task, sink, self._checkpoints(part, task))
        if task.keep_rows:
            return RangeSamples(replace(result, factors=None), result.factors)
        return RangeSamples(result)

    def _run(
        self, part: Range, task: SampleTask, sink: Sink | None, checkpoints: Checkpoints | None
    ) -> SampleResult:
        request = replace(
            self._request,
            reduce=task.reduce,
            form=task.form,
            vectors=task.vectors,
            against=task.against,
            samples=task.num_samples,
        )
        positions = _positions(part, of_others=task.of_others)
        with self._ready() as ready:
            planned = PlannedModel(ready, self._check_number)
            planned.learn(int(task.of_others), task.plans)
            found = PerSampleJob(
                planned,
                positions,
                request,
                loss=self._loss,
                loss_inputs=task.loss_inputs,
                by_sample=task.by_sample,
                observer=self.observer,
                checkpoints=checkpoints,
                budget_bytes=self._budget_bytes,
                sink=sink,
            ).run()
            self.observer.step("samples", found.samples, found.samples)
            return found

    def _ready(self) -> AbstractContextManager[CallableModel]:
        return callable_model(self._model, self._groups, **self._setting)


def _positions(part: Range, *, of_others: bool) -> list[Position]:
    return [Position(int(of_others), shard) for shard in range(part.start, part.stop)]


class OffsetSink:
    """Takes a range's rows to their places among those of the whole job."""

    def __init__(self, sink: Sink, first_sample: int, num_samples: int) -> None:
        self._sink, self._first, self._num_samples = sink, first_sample, num_samples

    def begin(
        self, shapes: Mapping[str, tuple[int, ...]], dtypes: Mapping[str, torch.dtype]
    ) -> None:
        """Tell the sink the shapes of the whole job; every range does."""
        whole = {name: (self._num_samples, *shape[1:]) for name, shape in shapes.items()}
        self._sink.begin(whole, dtypes)

    def write(self, name: str, at: Piece, piece: Tensor) -> None:
        """Pass a piece on."""
        samples, outputs, rows = at
        moved = slice(samples.start + self._first, samples.stop + self._first)
        self._sink.write(name, (moved, outputs, rows), piece)


class _Nowhere:
    """A sink for rows that nobody wants."""

    def begin(
        self, shapes: Mapping[str, tuple[int, ...]], dtypes: Mapping[str, torch.dtype]
    ) -> None: ...

    def write(self, name: str, at: Piece, piece: Tensor) -> None: ...


def gram_of(left: Rows, right: Rows | None, *, trace: bool) -> Tensor:
    """Return J J'ᵀ of two ranges' factors, (B, Y, B', Y') or its trace; J Jᵀ without the second."""
    assert isinstance(left, Factored)
    if right is None:
        return left.gram(trace=trace)
    assert isinstance(right, Factored)
    return left.gram_with(right, trace=trace)
