"""One per-sample computation, shard after shard.

Shapes: B samples over all shards, Y outputs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from gradbox_engine.checkpoint import Checkpoint, Checkpoints, NoCheckpoints
from gradbox_engine.errors import BadInputs, BadReduction
from gradbox_engine.model.precision import accumulation_dtype
from gradbox_engine.per_sample.kept_factors import (
    CrossGram,
    CrossGramOfShards,
    Gram,
    KeepFactors,
    SmallerForm,
    check_names,
)
from gradbox_engine.per_sample.pieces import Sink
from gradbox_engine.per_sample.planned_model import PlannedModel
from gradbox_engine.per_sample.planning.model import CallableModel
from gradbox_engine.per_sample.reductions import (
    ClippedSum,
    Collector,
    Directional,
    Norms,
    Projected,
    ToArrays,
    ToSink,
    tangents_of,
)
from gradbox_engine.per_sample.request import OtherShards, Request, SampleResult
from gradbox_engine.per_sample.result_facts import ResultFacts
from gradbox_engine.per_sample.sample_loss import (
    OneAfterTheOther,
    SampleLoss,
    Scaled,
    check_given_apart,
    pulled_back,
    rows_of,
)
from gradbox_engine.per_sample.shard_run import ShardRun
from gradbox_engine.requests import Observer, Shard, Silent
from gradbox_factors import Factored, projection_of


class PerSampleJob:
    """One computation over shards."""

    def __init__(
        self,
        model: CallableModel,
        request: Request,
        inputs: Sequence[Shard],
        observer: Observer | None,
        checkpoints: Checkpoints | None,
        budget_bytes: int,
        sink: Sink | None,
    ) -> None:
        may_be_dense = request.reduce == "none" and request.form in ("dense", "auto")
        if sink is not None and not may_be_dense:
            raise BadReduction("sink: expected none unless reduce='none' and rows may be dense")
        if not len(inputs):
            raise BadInputs("inputs: expected one shard or more, got none")
        if isinstance(request.against, Factored):
            check_names(tuple(model.parameters), request.against)
        self._model, self._planned = model, PlannedModel(model)
        self._request, self._inputs = request, inputs
        self._others = request.against if isinstance(request.against, OtherShards) else None
        self._observer = observer or Silent()
        self._checkpoints = checkpoints or NoCheckpoints()
        self._budget_bytes, self._sink = budget_bytes, sink
        self._counts = [
            self._planned.count(self._arguments(index), index)
            for index in range(model.num_others + len(inputs))
        ]
        self._num_others = sum(self._counts[: model.num_others])  # samples

    def gradients(
        self,
        loss: Callable[..., Tensor],
        loss_inputs: Mapping[str, Any],
        *,
        by_sample: Collection[str] | None = None,
    ) -> SampleResult:
        """Collect dℓ_b/dθ of every shard.

        Args:
            by_sample: the loss inputs that have one row a sample; by default those of so many rows.
        """
        first = self._model.num_others
        own = SampleLoss(loss, loss_inputs, self._counts[first:], by_sample=by_sample)
        losses: SampleLoss | OneAfterTheOther = own
        if self._others is not None:
            given = self._others.loss_inputs
            check_given_apart(loss_inputs, given, (sum(self._counts[first:]), self._num_others))
            others = SampleLoss(loss, {**loss_inputs, **given}, self._counts[:first])
            losses = OneAfterTheOther(others, own, first=first)
        return self._collected(Scaled(losses) if self._model.in_float16 else losses)

    def jacobians(self) -> SampleResult:
        """Collect dz_by/dθ of every shard."""
        if self._request.reduce == "vjp":
            return self._pulled_back()
        return self._collected(rows_of)

    def _collected(self, head: Callable[[Tensor, int], Tensor]) -> SampleResult:
        start = time.perf_counter()
        collector = self._collector()
        facts = ResultFacts(set(self._model.parameters))
        found = self._resumed(facts)
        if found is not None:
            collector.begin(sum(self._counts), facts.outputs)
            collector.resume(found)
        for run in self._runs(head, first=facts.shards):
            outputs = run.graph.outputs
            if not facts.shards:
                collector.begin(sum(self._counts), outputs)
            elif outputs != facts.outputs:
                raise BadInputs(
                    f"{self._model.where(facts.shards)}: expected {facts.outputs} outputs a sample "
                    f"like {self._model.where(0)}, got {outputs}: pad the shards alike, or pool in "
                    f"readout="
                )
            for chunk in self._chunks(run, collector):
                self._tell(facts.samples)
                terms = run.terms(chunk, last=chunk.stop == outputs)
                if isinstance(head, Scaled):
                    while head.overflown(terms):
                        run.start()
                        terms = run.terms(chunk, last=True)
                    terms = head.unscaled(terms, wide_rows=self._request.reduce != "none")
                facts.unreached &= {name for name, term in terms.items() if term.rule == "zero"}
                collector.take(terms, facts.samples, chunk)
                del terms
            facts.add(run, _values(run, head))
            self._keep(facts, collector.state)
        fields = collector.result(one_output=head is not rows_of)
        return self._own(facts.result(tuple(self._model.parameters), start, **fields))

    def _own(self, result: SampleResult) -> SampleResult:
        """Return the result as that of the job's own samples, with the others' values apart."""
        if self._others is None or result.values is None:
            return result
        others, own = result.values.tensor_split([self._num_others])
        return replace(
            result, samples=result.samples - self._num_others, values=own, other_values=others
        )

    def _pulled_back(self) -> SampleResult:
        """Return Jᵀ u: one forward and one ordinary backward for each shard."""
        start = time.perf_counter()
        vectors, num_own = self._request.vectors, sum(self._counts) - self._num_others
        if not isinstance(vectors, Tensor) or vectors.shape[:1] != (num_own,):
            got = tuple(vectors.shape) if isinstance(vectors, Tensor) else type(vectors).__name__
            raise BadReduction(
                f"vectors: expected a tensor shaped like z, ({num_own}, ...), got {got}"
            )
        facts = ResultFacts(set())
        resumed = self._resumed(facts)
        kept, totals = KeepFactors(smaller=True), {}
        if resumed is not None:
            totals = dict(resumed.section("totals").tensors)
            if "others" in resumed:
                kept.resume(resumed.section("others"))

        def state(_: int) -> Checkpoint:
            sections = {"totals": Checkpoint(totals)}
            if self._others is not None:
                sections["others"] = kept.state(self._num_others)
            return Checkpoint.of_sections(**sections)

        for run in self._runs(rows_of, first=facts.shards):
            graph = run.graph
            at = facts.samples - self._num_others
            if at < 0:
                outputs = range(graph.outputs)
                kept.take(run.terms(outputs, last=True), facts.samples, outputs)
            else:
                found = self._pulled_back_by(run, vectors[at : at + graph.samples])
                for name, gradient in found.items():
                    part = gradient.to(accumulation_dtype(gradient.dtype))
                    totals[name] = totals[name] + part if name in totals else part
            facts.add(run, graph.z.detach())
            self._keep(facts, state)
        totals = {n: x.to(self._model.parameters[n].dtype) for n, x in totals.items()}
        against = self._request.against
        if against is not None:
            rows = against if isinstance(against, Factored) else kept.factors()
            totals = {"jvp": rows.jvp(totals)}
        return self._own(facts.result(tuple(self._model.parameters), start, arrays=totals))

    def _pulled_back_by(self, run: ShardRun, cotangents: Tensor) -> dict[str, Tensor]:
        """Return a shard's Jᵀ u."""
        graph = run.graph
        if cotangents.shape != graph.z.shape:
            expected = (sum(self._counts) - self._num_others, *graph.z.shape[1:])
            raise BadReduction(
                f"vectors: expected shape {expected}, got {tuple(self._request.vectors.shape)}"
            )
        cotangents = cotangents.reshape(graph.value.shape)
        with run.blaming_backward():
            found = pulled_back(graph, cotangents, scaled=self._model.in_float16)
        run.check_alone()
        return found

    def _resumed(self, facts: ResultFacts) -> Checkpoint | None:
        """Return the rows' part of what an earlier process left, and give the facts theirs."""
        found = self._checkpoints.read()
        if found is None:
            return None
        found = found.to(self._model.device)
        facts.resume(found.section("facts"))
        self._planned.resume(found.section("plans").facts["states"], self._arguments)
        return found.section("rows")

    def _keep(self, facts: ResultFacts, rows: Callable[[int], Checkpoint]) -> None:
        """Write the state after a shard, if it is time; `rows` gives that of so many samples."""
        if self._checkpoints.due():
            self._checkpoints.write(
                Checkpoint.of_sections(
                    facts=facts.state(),
                    plans=Checkpoint({}, {"states": self._planned.states()}),
                    rows=rows(facts.samples),
                )
            )

    def _runs(self, head: Callable[[Tensor, int], Tensor], *, first: int) -> Iterator[ShardRun]:
        for index in range(first, len(self._counts)):
            self._tell(sum(self._counts[:index]))
            arguments = self._arguments(index)
            yield ShardRun(
                self._planned, arguments, index, _at(head, index), loss=head is not rows_of
            )
        self._tell(sum(self._counts))

    def _arguments(self, index: int) -> dict[str, Any]:
        """Return a shard's arguments; the first shards are the other ones."""
        own = index - self._model.num_others
        if own < 0 and self._others is not None:
            return self._model.arguments(self._others.inputs[index])
        return self._model.arguments(self._inputs[own])

    def _tell(self, done: int) -> None:
        self._observer.step("samples", done, sum(self._counts))

    def _collector(self) -> Collector:
        request = self._request
        if request.reduce == "norm":
            return Norms()
        if request.reduce == "projection":
            return Projected(projection_of(request.kind, request.dim or 1, request.seed))
        if request.reduce == "clipped_sum":
            return ClippedSum(request.clip or 1.0, self._model.parameters)
        if request.reduce == "jvp":
            return Directional(tangents_of(request.vectors, self._model.parameters))
        if request.reduce in ("gram", "gram_trace"):
            trace = request.reduce == "gram_trace"
            if isinstance(request.against, Factored):
                return CrossGram(request.against, trace=trace)
            if request.against is not None:
                return CrossGramOfShards(self._num_others, trace=trace)
            return Gram(trace=trace)
        if request.form in ("factored", "smaller"):
            return KeepFactors(smaller=request.form == "smaller")
        dense = ToArrays() if self._sink is None else ToSink(self._sink, self._budget_bytes)
        if request.form == "dense":
            return dense
        return SmallerForm(dense, self._budget_bytes, samples=request.samples)

    def _chunks(self, run: ShardRun, collector: Collector) -> Iterator[range]:
        """Cut the outputs so that half the budget holds their gradients."""
        outputs, each_bytes = run.graph.outputs, max(1, run.graph.gradient_bytes())
        whole = collector.whole(outputs * each_bytes)
        step = max(1, outputs if whole else self._budget_bytes // 2 // each_bytes)
        for first in range(0, outputs, step):
            yield range(first, min(first + step, outputs))


def _values(run: ShardRun, head: Callable[[Tensor, int], Tensor]) -> Tensor:
    """Return a shard's losses, or its z."""
    if isinstance(head, Scaled):
        return head.losses
    return (run.graph.z if head is rows_of else run.graph.value[:, 0]).detach()


def _at(head: Callable[..., Tensor], index: int) -> Callable[..., Tensor]:
    return lambda z, first=0: head(z, index, first)
