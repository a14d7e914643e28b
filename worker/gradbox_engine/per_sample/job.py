"""One per-sample computation, shard after shard.

Shapes: B samples over all shards, Y outputs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from gradbox_engine.checkpoint import Checkpoint, Checkpoints, NoCheckpoints
from gradbox_engine.errors import BadInputs, BadReduction
from gradbox_engine.model.calling.blame import blaming, is_out_of_memory
from gradbox_engine.model.calling.shard_feed import Position
from gradbox_engine.per_sample.pieces import Sink
from gradbox_engine.per_sample.planned_model import PlannedModel
from gradbox_engine.per_sample.reductions import (
    ClippedSum,
    Collector,
    CrossGram,
    Directional,
    Gram,
    KeepFactors,
    Norms,
    Projected,
    PulledBack,
    SmallerForm,
    ToArrays,
    ToSink,
    check_names,
    narrowed,
    tangents_of,
)
from gradbox_engine.per_sample.request import (
    Request,
    RowsCompared,
    SampleResult,
    most_compared,
)
from gradbox_engine.per_sample.sample_loss import SampleLoss, rows_of
from gradbox_engine.per_sample.shard_run import ShardRun
from gradbox_engine.requests import Observer, Silent
from gradbox_factors import Factored, projection_of

T = TypeVar("T")

BUDGET_BYTES = 2**30


@dataclass
class ResultFacts:
    """What a result states besides its arrays."""

    unreached: set[str]
    values: list[Tensor] = field(default_factory=list)
    routes: dict[str, set[str]] = field(default_factory=dict)
    loops: dict[str, str] = field(default_factory=dict)
    shards: int = 0
    samples: int = 0
    outputs: int = 1
    compared: RowsCompared = "none"

    def add(self, run: ShardRun, values: Tensor) -> None:
        """Add a shard that is done."""
        for name, taken in run.plan.routes.items():
            self.routes.setdefault(name, set()).update(taken)
        self.loops.update(run.plan.loops)
        self.compared = most_compared((self.compared, run.compared))
        self.values.append(values)
        self.shards += 1
        self.samples += run.graph.samples
        self.outputs = run.graph.outputs

    def state(self) -> Checkpoint:
        """Return all of it, for another process."""
        facts = {
            "unreached": sorted(self.unreached),
            "routes": {name: sorted(taken) for name, taken in self.routes.items()},
            "loops": self.loops,
            "shards": self.shards,
            "samples": self.samples,
            "outputs": self.outputs,
            "compared": self.compared,
        }
        return Checkpoint({"values": torch.cat(self.values)}, facts)

    def resume(self, found: Checkpoint) -> None:
        """Go on from a `state` of another process."""
        facts = found.facts
        self.unreached = set(facts["unreached"])
        self.values = [found.tensors["values"]]
        self.routes = {name: set(taken) for name, taken in facts["routes"].items()}
        self.loops = dict(facts["loops"])
        self.shards, self.samples = facts["shards"], facts["samples"]
        self.outputs, self.compared = facts["outputs"], facts["compared"]

    def result(self, names: Sequence[str], start: float, **found: Any) -> SampleResult:
        """Return the result of a job that began at `start`."""
        return SampleResult(
            **found,
            values=self.values[0] if len(self.values) == 1 else torch.cat(self.values),
            roads={
                name: ("loop",) if name in self.loops else tuple(sorted(taken))
                for name, taken in self.routes.items()
            },
            loops=self.loops,
            unreached=tuple(name for name in names if name in self.unreached),
            names=tuple(names),
            samples=self.samples,
            outputs=self.outputs,
            rows_compared=self.compared,
            seconds=time.perf_counter() - start,
        )


class PerSampleJob:
    """One computation over shards; `state` is what another process goes on from."""

    def __init__(
        self,
        planned: PlannedModel,
        positions: Sequence[Position],
        request: Request,
        *,
        loss: Callable[..., Tensor] | None = None,
        loss_inputs: Mapping[str, Any] | None = None,
        by_sample: Collection[str] | None = None,
        observer: Observer | None = None,
        checkpoints: Checkpoints | None = None,
        budget_bytes: int = BUDGET_BYTES,
        sink: Sink | None = None,
        collector: Collector | None = None,
    ) -> None:
        """Count the samples.

        Args:
            loss: whose rows are wanted; without one those of z.
            by_sample: the loss inputs that have one row a sample; by default those of so many rows.
            collector: takes the terms in place of what the request asks for.

        Raises:
            BadReduction: a sink for what is not dense, or rows by other parameters.
            NoBatchAxis: the samples of a shard cannot be found.
        """
        may_be_dense = request.reduce == "none" and request.form in ("dense", "auto")
        if sink is not None and not may_be_dense:
            raise BadReduction("sink: expected none unless reduce='none' and rows may be dense")
        model = planned.model
        self._against = request.against if isinstance(request.against, Factored) else None
        if self._against is not None:
            check_names(tuple(model.parameters), self._against)
        self._model, self._planned, self._positions = model, planned, positions
        self._request, self._observer = request, observer or Silent()
        self._checkpoints = checkpoints or NoCheckpoints()
        self._budget_bytes, self._sink = budget_bytes, sink
        self._counts = [self._counted(position) for position in positions]
        self.num_samples = sum(self._counts)
        self._head: Callable[..., Tensor] = rows_of
        if loss is not None:
            self._head = SampleLoss(loss, loss_inputs or {}, self._counts, by_sample=by_sample)
        self._collector = collector or self._new_collector()
        self._facts = ResultFacts(set() if request.reduce == "vjp" else set(model.parameters))

    def run(self) -> SampleResult:
        """Collect what the request asks for of every shard, and tell the observer of each.

        That all are done is left to the caller to tell.
        """
        start, facts, collector = time.perf_counter(), self._facts, self._collector
        self._resume()
        row_is_due = self._planned.row_is_due(self._request.samples or self.num_samples)
        begun = facts.shards  # by an earlier process
        for index in range(begun, len(self._positions)):
            first = index == begun
            shard = partial(self._shard, index, first=first, row_is_due=row_is_due and first)
            self._in_less_memory(self._positions[index], shard)
            if self._checkpoints.due():
                self._checkpoints.write(self.state())
        fields = collector.result(one_output=self._head is not rows_of)
        self._model.recomputation.difference()  # which is within its tolerance
        recomputed = self._model.recomputation.done(self._positions)
        names = tuple(self._model.parameters)
        return facts.result(names, start, recomputed=recomputed, **fields)

    def state(self) -> Checkpoint:
        """Return what another process goes on from, between two shards."""
        return Checkpoint.of_sections(
            facts=self._facts.state(),
            plans=Checkpoint({}, {"states": self._planned.states()}),
            rows=self._collector.state(self._facts.samples),
        )

    def _resume(self) -> None:
        """Go on from what an earlier process left, if it left something."""
        left = self._checkpoints.read()
        if left is not None:
            left = left.to(self._model.device)
            self._facts.resume(left.section("facts"))
            self._planned.resume(left.section("plans").facts["states"])
            self._collector.begin(self.num_samples, self._facts.outputs)
            self._collector.resume(left.section("rows"))

    def _shard(self, index: int, *, first: bool, row_is_due: bool) -> None:
        """Run a shard, and collect what is asked for of it; see `ShardRun`."""
        facts, collector, positions = self._facts, self._collector, self._positions
        self._taken = False
        self._tell(sum(self._counts[:index]))
        head, loss = self._head_of(index), self._head is not rows_of
        run = ShardRun(
            self._planned,
            positions[index],
            head,
            loss=loss,
            first=first,
            row_is_due=row_is_due,
        )
        self._model.feed.prefetch(positions[index + 1] if index + 1 < len(positions) else None)
        outputs = run.graph.outputs
        if not facts.shards:
            collector.begin(self.num_samples, outputs)
        elif outputs != facts.outputs:
            raise BadInputs(
                f"{self._model.where(positions[index])}: expected {facts.outputs} "
                f"outputs a sample like shard {positions[0].shard}, got "
                f"{outputs}: pad the shards alike, or pool in readout="
            )
        if isinstance(collector, PulledBack):
            collector.add(self._pulled_back(run))
        else:
            self._collect(run)
        facts.add(run, _values(run, self._head))

    def _counted(self, position: Position) -> int:
        return self._in_less_memory(position, partial(self._planned.count, position))

    def _in_less_memory(self, position: Position, step: Callable[[], T]) -> T:
        """Run a step of a shard; where memory runs out, once more with its blocks recomputed.

        Not where each of several samples would take a backward pass of all: smaller shards do
        better. Nor once some of its rows were taken.

        Raises:
            torch.OutOfMemoryError: it does not fit.
        """
        self._taken = False
        try:
            return step()
        except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
            recomputation = self._model.recomputation
            if (
                not is_out_of_memory(error)
                or self._taken
                or not recomputation.after_out_of_memory()
            ):
                raise
            message = str(error)
        # Outside the handler, whose traceback holds on to the failed step's tensors.
        torch.cuda.empty_cache()
        samples, plan = self._planned.count(position), self._planned.plan(position).plan
        if samples > 1 and not plan.alone and self._request.reduce != "vjp":
            raise torch.OutOfMemoryError(
                f"{message}; it was a shard of {samples} samples: make the shards smaller"
            )
        return step()

    def _head_of(self, index: int) -> Callable[..., Tensor]:
        """Return what is differentiated of a shard, as a function of z."""
        where = self._model.where(self._positions[index])

        def head(z: Tensor, first: int = 0) -> Tensor:
            with blaming("the loss", where):
                return self._head(z, index, first)

        return head

    def _collect(self, run: ShardRun) -> None:
        """Take a shard's terms, of some outputs after the other."""
        facts, outputs = self._facts, run.graph.outputs
        for chunk in self._chunks(run):
            self._tell(facts.samples)
            terms = run.terms(chunk, last=chunk.stop == outputs)
            if self._model.in_float16 and self._request.reduce == "none":
                terms = narrowed(terms, self._model.parameters)
            self._taken = True
            facts.unreached &= {name for name, term in terms.items() if term.rule == "zero"}
            self._collector.take(terms, facts.samples, chunk)
            del terms

    def _pulled_back(self, run: ShardRun) -> dict[str, Tensor]:
        """Return a shard's Jᵀ u by one ordinary backward pass."""
        graph, first = run.graph, self._facts.samples
        cotangents = self._request.vectors[first : first + graph.samples]
        if cotangents.shape != graph.z.shape:
            expected = (self.num_samples, *graph.z.shape[1:])
            raise BadReduction(
                f"vectors: expected shape {expected}, got {tuple(self._request.vectors.shape)}"
            )
        cotangents = cotangents.reshape(graph.value.shape)
        with run.blaming_backward():
            gradients = graph.pulled_back(cotangents)
        run.check_alone()
        return gradients

    def _tell(self, done: int) -> None:
        self._observer.step("samples", done, self.num_samples)

    def _new_collector(self) -> Collector:
        request, parameters = self._request, self._model.parameters
        if request.reduce == "norm":
            return Norms()
        if request.reduce == "projection":
            projection = projection_of(request.kind, request.dim or 1, request.seed)
            return Projected(projection, list(parameters))
        if request.reduce == "clipped_sum":
            return ClippedSum(request.clip or 1.0, parameters)
        if request.reduce == "jvp":
            return Directional(tangents_of(request.vectors, parameters))
        if request.reduce == "vjp":
            check_cotangents(request.vectors, self.num_samples)
            return PulledBack(parameters, self._against)
        if request.reduce in ("gram", "gram_trace"):
            trace = request.reduce == "gram_trace"
            if self._against is not None:
                return CrossGram(self._against, trace=trace)
            return Gram(trace=trace)
        if request.form in ("factored", "smaller"):
            return KeepFactors(smaller=request.form == "smaller")
        dense = ToArrays() if self._sink is None else ToSink(self._sink, self._budget_bytes)
        if request.form == "dense":
            return dense
        return SmallerForm(dense, self._budget_bytes, samples=request.samples)

    def _chunks(self, run: ShardRun) -> Iterator[range]:
        """Cut the outputs so that half the budget holds their gradients."""
        outputs, each_bytes = run.graph.outputs, max(1, run.graph.gradient_bytes())
        whole = self._collector.whole(outputs * each_bytes)
        step = max(1, outputs if whole else self._budget_bytes // 2 // each_bytes)
        for first in range(0, outputs, step):
            yield range(first, min(first + step, outputs))


def check_cotangents(vectors: Any, num_samples: int) -> None:
    """Refuse what has not one row a sample.

    Raises:
        BadReduction: it is no tensor, or has another number of rows.
    """
    if not isinstance(vectors, Tensor) or vectors.shape[:1] != (num_samples,):
        got = tuple(vectors.shape) if isinstance(vectors, Tensor) else type(vectors).__name__
        raise BadReduction(
            f"vectors: expected a tensor shaped like z, ({num_samples}, ...), got {got}"
        )


def _values(run: ShardRun, head: Callable[..., Tensor]) -> Tensor:
    """Return a shard's losses, or its z."""
    return (run.graph.z if head is rows_of else run.graph.value[:, 0]).detach()
