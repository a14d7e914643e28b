"""One per-sample computation, shard after shard.

Shapes: B samples over all shards, Y outputs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gradbox_engine.errors import BadInputs
from gradbox_engine.per_sample.arena import Arena, Sink
from gradbox_engine.per_sample.backward import Traced
from gradbox_engine.per_sample.errors import BadReduction
from gradbox_engine.per_sample.fp16_scaling import Scaled, pulled_back
from gradbox_engine.per_sample.planning.model import Session
from gradbox_engine.per_sample.reductions import (
    ClippedSum,
    Collector,
    Directional,
    Keep,
    Norms,
    Projected,
    ToArena,
    ToSink,
)
from gradbox_engine.per_sample.request import Request, SampleObserver, SampleResult
from gradbox_engine.per_sample.sample_loss import rows_of
from gradbox_factors import Sketch

Shard = Mapping[str, Any]


class Job:
    """One computation over shards."""

    def __init__(
        self,
        request: Request,
        inputs: Sequence[Shard],
        counts: Sequence[int],
        observer: SampleObserver | None,
        budget_bytes: int,
        sink: Sink | None,
        arena: Arena | None,
    ) -> None:
        if sink is not None and (request.reduce != "none" or request.form != "dense"):
            raise BadReduction("sink: expected none unless reduce='none' and form='dense'")
        self._request, self._inputs, self._counts = request, inputs, counts
        self._observer, self._budget_bytes = observer, budget_bytes
        self._sink, self._arena = sink, arena

    def run(self, session: Session, head: Callable[[Tensor, int], Tensor]) -> SampleResult:
        """Collect every shard's terms."""
        start = time.perf_counter()
        collector = self._collector(session)
        values, unreached, outputs, done = [], set(session.parameters), 0, 0
        roads: dict[str, set[str]] = {}
        loops: dict[str, str] = {}
        if head is not rows_of and session.rounding == torch.float16:
            head = Scaled(head)
        for index, shard in self._steps():
            arguments = session.arguments(shard)
            whole = head is rows_of
            traced = session.trace(arguments, index, _at(head, index), foldable=whole)
            if index == 0:
                outputs = traced.outputs
                collector.begin(sum(self._counts), outputs)
            elif traced.outputs != outputs:
                raise BadInputs(
                    f"shard {index}: expected {outputs} outputs a sample like shard 0, got "
                    f"{traced.outputs}: pad the shards alike, or pool in readout="
                )
            for chunk in self._chunks(traced, collector):
                self._tell(done)
                terms = traced.terms(chunk, last=chunk.stop == traced.outputs)
                if isinstance(head, Scaled):
                    while head.overflown(terms):
                        traced = session.trace(arguments, index, _at(head, index))
                        terms = traced.terms()
                    terms = head.unscaled(terms)
                unreached &= {name for name, term in terms.items() if term.rule == "zero"}
                collector.take(terms, done, chunk)
                del terms
            for name, taken in traced.plan.roads.items():
                roads.setdefault(name, set()).update(taken)
            loops.update(traced.plan.loops)
            values.append(_values(traced, head))
            done += traced.samples
            del traced
        return SampleResult(
            **self._finished(collector, squeeze=head is not rows_of),
            values=torch.cat(values),
            roads={
                name: ("loop",) if name in loops else tuple(sorted(taken))
                for name, taken in roads.items()
            },
            loops=loops,
            unreached=tuple(name for name in session.parameters if name in unreached),
            names=tuple(session.parameters),
            samples=done,
            outputs=outputs,
            seconds=time.perf_counter() - start,
        )

    def pulled_back(self, session: Session) -> SampleResult:
        """Return Jᵀ u: one forward and one ordinary backward for each shard."""
        start = time.perf_counter()
        vectors = self._request.vectors
        if not isinstance(vectors, Tensor) or vectors.shape[:1] != (sum(self._counts),):
            got = tuple(vectors.shape) if isinstance(vectors, Tensor) else type(vectors).__name__
            raise BadReduction(
                f"vectors: expected a tensor shaped like z, ({sum(self._counts)}, ...), got {got}"
            )
        totals: dict[str, Tensor] = {}
        values, done, outputs = [], 0, 1
        for index, shard in self._steps():
            traced = session.trace(session.arguments(shard), index, _at(rows_of, index))
            part = vectors[done : done + traced.samples]
            if part.shape != traced.z.shape:
                raise BadReduction(
                    f"vectors: expected shape {(sum(self._counts), *traced.z.shape[1:])}, got "
                    f"{tuple(vectors.shape)}"
                )
            for name, gradient in pulled_back(traced, part.reshape(traced.value.shape)).items():
                totals[name] = totals[name] + gradient if name in totals else gradient
            values.append(traced.z)
            done, outputs = done + traced.samples, traced.outputs
        return SampleResult(
            arrays=totals,
            names=tuple(session.parameters),
            values=torch.cat(values),
            samples=done,
            outputs=outputs,
            seconds=time.perf_counter() - start,
        )

    def _steps(self) -> Iterator[tuple[int, Shard]]:
        for index, shard in enumerate(self._inputs):
            self._tell(sum(self._counts[:index]))
            yield index, shard
        self._tell(sum(self._counts))

    def _tell(self, done: int) -> None:
        if self._observer is not None:
            self._observer.step("samples", done, sum(self._counts))

    def _collector(self, session: Session) -> Any:
        request = self._request
        if request.reduce == "norm":
            return Norms()
        if request.reduce == "projection":
            return Projected(Sketch(request.dim or 1, request.seed))
        if request.reduce == "clipped_sum":
            return ClippedSum(request.clip or 1.0)
        if request.reduce == "jvp":
            return Directional(_tangents(request.vectors, session))
        if request.reduce != "none" or request.form != "dense":
            return Keep(smaller=request.form == "auto")
        if self._sink is not None:
            return ToSink(self._sink, self._budget_bytes)
        return ToArena(self._arena or Arena())

    def _chunks(self, traced: Traced, collector: Collector) -> Iterator[range]:
        """Cut the outputs so that half the budget holds their gradients."""
        outputs, each_bytes = traced.outputs, max(1, traced.gradient_bytes())
        whole = collector.whole or traced.folded
        step = outputs if whole else max(1, self._budget_bytes // 2 // each_bytes)
        for first in range(0, outputs, step):
            yield range(first, min(first + step, outputs))

    def _finished(self, collector: Any, *, squeeze: bool) -> dict[str, Any]:
        def out(x: Tensor) -> Tensor:
            return x.squeeze(1) if squeeze else x

        if isinstance(collector, ToArena):
            return {"arrays": {name: out(x) for name, x in collector.arrays.items()}}
        if isinstance(collector, Norms):
            total = torch.stack(list(collector.squares.values())).sum(0).sqrt()
            parts = {name: out(x.sqrt()) for name, x in collector.squares.items()}
            return {"arrays": {"norm": out(total)}, "parameter_norms": parts}
        if isinstance(collector, Projected | Directional):
            name = "jvp" if isinstance(collector, Directional) else "projection"
            return {"arrays": {} if collector.total is None else {name: out(collector.total)}}
        if isinstance(collector, ClippedSum):
            norms = torch.cat(collector.norms).squeeze(1)
            return {"arrays": collector.totals, "parameter_norms": {"": norms}}
        if isinstance(collector, Keep) and self._request.reduce != "none":
            trace = self._request.reduce == "gram_trace"
            gram = collector.factors.gram(trace=trace)
            if squeeze:
                gram = gram[:, 0, :, 0]
            return {"arrays": {"gram": gram}}
        return {"arrays": {}, "factors": collector.factors if isinstance(collector, Keep) else None}


def _values(traced: Traced, head: Callable[[Tensor, int], Tensor]) -> Tensor:
    """Return a shard's losses, or its z."""
    if isinstance(head, Scaled):
        return head.losses
    return traced.z if head is rows_of else traced.value.detach()[:, 0]


def _at(head: Callable[[Tensor, int], Tensor], index: int) -> Callable[[Tensor], Tensor]:
    return lambda z: head(z, index)


def _tangents(vectors: Any, session: Session) -> dict[str, Tensor]:
    if not isinstance(vectors, Mapping) or not vectors:
        raise BadReduction(
            f"vectors: expected a tangent by parameter name, got {type(vectors).__name__}"
        )
    tangents = {}
    for name, tangent in vectors.items():
        parameter = session.parameters.get(name)
        if parameter is None or not isinstance(tangent, Tensor) or tangent.shape != parameter.shape:
            expected = tuple(parameter.shape) if parameter is not None else "no such parameter"
            got = tuple(tangent.shape) if isinstance(tangent, Tensor) else type(tangent).__name__
            raise BadReduction(f"vectors[{name!r}]: expected {expected}, got {got}")
        tangents[name] = tangent.to(parameter)
    return tangents
