"""One per-sample computation, shard after shard.

Shapes: B samples over all shards, Y outputs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from gradbox_engine.errors import BadInputs, BadReduction
from gradbox_engine.per_sample.pieces import Sink
from gradbox_engine.per_sample.planning.model import CallableModel
from gradbox_engine.per_sample.reductions import (
    ClippedSum,
    Collector,
    Directional,
    Gram,
    KeepFactors,
    Norms,
    Projected,
    ToArrays,
    ToSink,
)
from gradbox_engine.per_sample.request import Request, SampleObserver, SampleResult
from gradbox_engine.per_sample.sample_loss import SampleLoss, rows_of
from gradbox_engine.per_sample.sample_scales import Scaled, pulled_back
from gradbox_engine.per_sample.shard_run import PlannedModel, ShardRun
from gradbox_factors import Sketch

Shard = Mapping[str, Any]


@dataclass
class _Facts:
    """What a result states besides its arrays."""

    unreached: set[str]
    values: list[Tensor] = field(default_factory=list)
    routes: dict[str, set[str]] = field(default_factory=dict)
    loops: dict[str, str] = field(default_factory=dict)
    samples: int = 0
    outputs: int = 1

    def add(self, run: ShardRun, values: Tensor) -> None:
        """Add a shard that is done."""
        for name, taken in run.plan.routes.items():
            self.routes.setdefault(name, set()).update(taken)
        self.loops.update(run.plan.loops)
        self.values.append(values)
        self.samples += run.graph.samples
        self.outputs = run.graph.outputs

    def result(self, names: Sequence[str], start: float, **found: Any) -> SampleResult:
        """Return the result of a job that began at `start`."""
        return SampleResult(
            **found,
            values=torch.cat(self.values),
            roads={
                name: ("loop",) if name in self.loops else tuple(sorted(taken))
                for name, taken in self.routes.items()
            },
            loops=self.loops,
            unreached=tuple(name for name in names if name in self.unreached),
            names=tuple(names),
            samples=self.samples,
            outputs=self.outputs,
            seconds=time.perf_counter() - start,
        )


class Job:
    """One computation over shards."""

    def __init__(
        self,
        model: CallableModel,
        request: Request,
        inputs: Sequence[Shard],
        *,
        observer: SampleObserver | None,
        budget_bytes: int,
        sink: Sink | None,
    ) -> None:
        if sink is not None and (request.reduce != "none" or request.form != "dense"):
            raise BadReduction("sink: expected none unless reduce='none' and form='dense'")
        if not len(inputs):
            raise BadInputs("inputs: expected one shard or more, got none")
        self._model, self._planned = model, PlannedModel(model)
        self._request, self._inputs, self._observer = request, inputs, observer
        self._budget_bytes, self._sink = budget_bytes, sink
        self._counts = [
            self._planned.count(model.arguments(shard), index) for index, shard in enumerate(inputs)
        ]

    def gradients(
        self, loss: Callable[..., Tensor], loss_inputs: Mapping[str, Any]
    ) -> SampleResult:
        """Collect dℓ_b/dθ of every shard."""
        losses = SampleLoss(loss, loss_inputs, self._counts)
        return self._collected(Scaled(losses) if self._model.rounding == torch.float16 else losses)

    def jacobians(self) -> SampleResult:
        """Collect dz_by/dθ of every shard."""
        if self._request.reduce == "vjp":
            return self._pulled_back()
        return self._collected(rows_of)

    def _collected(self, head: Callable[[Tensor, int], Tensor]) -> SampleResult:
        start = time.perf_counter()
        collector = self._collector()
        facts = _Facts(set(self._model.parameters))
        for run in self._runs(head):
            outputs = run.graph.outputs
            if not facts.values:
                collector.begin(sum(self._counts), outputs)
            elif outputs != facts.outputs:
                raise BadInputs(
                    f"shard {len(facts.values)}: expected {facts.outputs} outputs a sample like "
                    f"shard 0, got {outputs}: pad the shards alike, or pool in readout="
                )
            for chunk in self._chunks(run, collector):
                self._tell(facts.samples)
                terms = run.terms(chunk, last=chunk.stop == outputs)
                if isinstance(head, Scaled):
                    while head.overflown(terms):
                        run.start()
                        terms = run.terms(chunk, last=True)
                    terms = head.unscaled(terms)
                facts.unreached &= {name for name, term in terms.items() if term.rule == "zero"}
                collector.take(terms, facts.samples, chunk)
                del terms
            facts.add(run, _values(run, head))
        found = collector.result(one_output=head is not rows_of)
        return facts.result(tuple(self._model.parameters), start, **found)

    def _pulled_back(self) -> SampleResult:
        """Return Jᵀ u: one forward and one ordinary backward for each shard."""
        start = time.perf_counter()
        vectors = self._request.vectors
        if not isinstance(vectors, Tensor) or vectors.shape[:1] != (sum(self._counts),):
            got = tuple(vectors.shape) if isinstance(vectors, Tensor) else type(vectors).__name__
            raise BadReduction(
                f"vectors: expected a tensor shaped like z, ({sum(self._counts)}, ...), got {got}"
            )
        totals: dict[str, Tensor] = {}
        facts = _Facts(set())
        for run in self._runs(rows_of):
            graph = run.graph
            part = vectors[facts.samples : facts.samples + graph.samples]
            if part.shape != graph.z.shape:
                raise BadReduction(
                    f"vectors: expected shape {(sum(self._counts), *graph.z.shape[1:])}, got "
                    f"{tuple(vectors.shape)}"
                )
            cotangents = part.reshape(graph.value.shape)
            found = pulled_back(graph, cotangents, rounding=self._model.rounding)
            for name, gradient in found.items():
                totals[name] = totals[name] + gradient if name in totals else gradient
            facts.add(run, graph.z.detach())
        return facts.result(tuple(self._model.parameters), start, arrays=totals)

    def _runs(self, head: Callable[[Tensor, int], Tensor]) -> Iterator[ShardRun]:
        for index, shard in enumerate(self._inputs):
            self._tell(sum(self._counts[:index]))
            arguments = self._model.arguments(shard)
            yield ShardRun(
                self._planned, arguments, index, _at(head, index), loss=head is not rows_of
            )
        self._tell(sum(self._counts))

    def _tell(self, done: int) -> None:
        if self._observer is not None:
            self._observer.step("samples", done, sum(self._counts))

    def _collector(self) -> Collector:
        request = self._request
        if request.reduce == "norm":
            return Norms()
        if request.reduce == "projection":
            return Projected(Sketch(request.dim or 1, request.seed))
        if request.reduce == "clipped_sum":
            return ClippedSum(request.clip or 1.0)
        if request.reduce == "jvp":
            return Directional(_tangents(request.vectors, self._model.parameters))
        if request.reduce in ("gram", "gram_trace"):
            return Gram(trace=request.reduce == "gram_trace")
        if request.form != "dense":
            return KeepFactors(smaller=request.form == "auto")
        if self._sink is not None:
            return ToSink(self._sink, self._budget_bytes)
        return ToArrays()

    def _chunks(self, run: ShardRun, collector: Collector) -> Iterator[range]:
        """Cut the outputs so that half the budget holds their gradients."""
        outputs, each_bytes = run.graph.outputs, max(1, run.graph.gradient_bytes())
        step = outputs if collector.whole else max(1, self._budget_bytes // 2 // each_bytes)
        for first in range(0, outputs, step):
            yield range(first, min(first + step, outputs))


def _values(run: ShardRun, head: Callable[[Tensor, int], Tensor]) -> Tensor:
    """Return a shard's losses, or its z."""
    if isinstance(head, Scaled):
        return head.losses
    return (run.graph.z if head is rows_of else run.graph.value[:, 0]).detach()


def _at(head: Callable[[Tensor, int], Tensor], index: int) -> Callable[[Tensor], Tensor]:
    return lambda z: head(z, index)


def _tangents(vectors: Any, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    if not isinstance(vectors, Mapping) or not vectors:
        raise BadReduction(
            f"vectors: expected a tangent by parameter name, got {type(vectors).__name__}"
        )
    tangents = {}
    for name, tangent in vectors.items():
        parameter = parameters.get(name)
        if parameter is None or not isinstance(tangent, Tensor) or tangent.shape != parameter.shape:
            expected = tuple(parameter.shape) if parameter is not None else "no such parameter"
            got = tuple(tangent.shape) if isinstance(tangent, Tensor) else type(tangent).__name__
            raise BadReduction(f"vectors[{name!r}]: expected {expected}, got {got}")
        tangents[name] = tangent.to(parameter)
    return tangents
