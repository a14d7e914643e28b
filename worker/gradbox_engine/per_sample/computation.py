"""Per-sample gradients and Jacobians of a list of shards: the two entry points.

    g_b   = dℓ_b/dθ,      ℓ = loss(z, **loss_inputs) of shape (B,), entry b of sample b alone
    J_by  = dz_by/dθ,     z of shape (B, ...), its further dims flattened to Y

No 1/B anywhere. Shard i runs under its own random stream, so masks are those of the batched pass.
Cost: one forward and one backward without weight gradients for each shard (Y cotangents at once for
a Jacobian, in chunks within the budget), then the products.

Shapes: B samples over all shards, Y outputs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from gradbox_factors import Sketch
from torch import Tensor, nn

from gradbox_engine.errors import BadInputs
from gradbox_engine.per_sample.arena import Arena, Sink
from gradbox_engine.per_sample.collecting import (
    ClippedSum,
    Collector,
    Directional,
    Keep,
    Norms,
    Projected,
    ToArena,
    ToSink,
)
from gradbox_engine.per_sample.failures import BadReduction, BadSampleLoss
from gradbox_engine.per_sample.request import (
    Form,
    GradientReduction,
    JacobianReduction,
    Request,
    SampleObserver,
    SampleResult,
)
from gradbox_engine.per_sample.session import Session

Shard = Mapping[str, Any]
BUDGET_BYTES = 2**30


def per_sample_gradient(
    model: nn.Module,
    inputs: Sequence[Shard],
    loss: Callable[..., Tensor],
    *,
    loss_inputs: Mapping[str, Any] | None = None,
    reduce: GradientReduction = "none",
    form: Form = "dense",
    clip: float | None = None,
    dim: int | None = None,
    seed: int = 0,
    projection_seed: int = 0,
    observer: SampleObserver | None = None,
    budget_bytes: int = BUDGET_BYTES,
    sink: Sink | None = None,
    arena: Arena | None = None,
    **session: Any,
) -> SampleResult:
    """Compute dℓ_b/dθ for every sample b.

    Args:
        inputs: shards, each {argument name: value}; whole numbers are positions.
        loss: (z, **loss_inputs) → (B,).
        loss_inputs: tensors with one row a sample over all shards are cut with the shards; what
            else there is goes whole.
        clip: the largest norm that `clipped_sum` lets through.
        dim: the length of a `projection`, which `projection_seed` names.
        budget_bytes: memory for pieces of a dense result on their way to `sink`.
        sink: takes a dense result in pieces; without it arrays are returned.
        arena: memory to write a dense result into; the arrays are its views until its next use.
        session: mode, wrt, precision, output, readout, weights, method, unchecked: see `Session`.

    Raises:
        BadReduction: the arguments do not fit together.
        BadSampleLoss: the loss does not have shape (B,), or couples samples.
        CoupledSamples: the model lets one sample see another.
    """
    request = Request(reduce, form, clip, dim, projection_seed)
    request.check(GradientReduction)
    with Session(model, seed=seed, **session) as prepared:
        counts = _samples_of(inputs, prepared)
        job = _Job(request, inputs, counts, observer, budget_bytes, sink, arena)
        return job.run(prepared, _LossHead(loss, loss_inputs or {}, counts))


def jacobian(
    model: nn.Module,
    inputs: Sequence[Shard],
    *,
    reduce: JacobianReduction = "none",
    form: Form = "dense",
    vectors: Any = None,
    dim: int | None = None,
    seed: int = 0,
    projection_seed: int = 0,
    observer: SampleObserver | None = None,
    budget_bytes: int = BUDGET_BYTES,
    sink: Sink | None = None,
    arena: Arena | None = None,
    **session: Any,
) -> SampleResult:
    """Compute dz_by/dθ for every sample b and output y.

    Args:
        vectors: for `vjp` cotangents shaped like z over all shards; for `jvp` a tangent by
            parameter name, 0 for names left out.
        session: and the others: see `per_sample_gradient`.

    Raises:
        BadReduction: the arguments do not fit together, or `vectors` does not fit z or θ.
        CoupledSamples: the model lets one sample see another.
    """
    request = Request(reduce, form, None, dim, projection_seed, vectors)
    request.check(JacobianReduction)
    with Session(model, seed=seed, **session) as prepared:
        counts = _samples_of(inputs, prepared)
        job = _Job(request, inputs, counts, observer, budget_bytes, sink, arena)
        if reduce == "vjp":
            return job.pulled_back(prepared)
        return job.run(prepared, _rows)


def _rows(z: Tensor, index: int) -> Tensor:
    return z.reshape(z.shape[0], -1)


class _LossHead:
    """The loss of one shard as (b, 1)."""

    def __init__(
        self, loss: Callable[..., Tensor], inputs: Mapping[str, Any], counts: Sequence[int]
    ) -> None:
        self._loss, self._inputs = loss, inputs
        self._starts = [sum(counts[:index]) for index in range(len(counts))]
        self._total = sum(counts)

    def __call__(self, z: Tensor, index: int) -> Tensor:
        start = self._starts[index]
        mine = {}
        for name, value in self._inputs.items():
            if isinstance(value, Tensor):
                value = value.to(z.device)
                if value.dim() and value.shape[0] == self._total:
                    value = value[start : start + z.shape[0]]
                if value.is_floating_point() and z.dtype == torch.float64:
                    value = value.double()
            mine[name] = value
        losses = self._loss(z, **mine)
        if not isinstance(losses, Tensor) or losses.shape != z.shape[:1]:
            got = tuple(losses.shape) if isinstance(losses, Tensor) else type(losses).__name__
            raise BadSampleLoss(
                f"the loss: expected one number a sample, shape ({z.shape[0]},), got {got}; do not "
                "sum or average over samples"
            )
        return losses[:, None]


class _Job:
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
        for index, shard in self._steps():
            arguments = session.arguments(shard)
            traced = session.trace(arguments, index, lambda z, index=index: head(z, index))
            if index == 0:
                outputs = traced.outputs
                collector.begin(sum(self._counts), outputs)
            for chunk in self._chunks(traced.outputs, traced.gradient_bytes(), collector):
                terms = traced.terms(chunk, last=chunk.stop == traced.outputs)
                unreached &= {name for name, term in terms.items() if term.rule == "zero"}
                collector.take(terms, done, chunk)
                del terms
            for name, taken in traced.plan.roads.items():
                roads.setdefault(name, set()).update(taken)
            loops.update(traced.plan.loops)
            values.append(traced.value.detach()[:, 0] if head is not _rows else traced.z)
            done += traced.samples
            del traced
        return SampleResult(
            **self._finished(collector, squeeze=head is not _rows),
            values=torch.cat(values),
            roads={
                name: ("loop",) if name in loops else tuple(sorted(taken))
                for name, taken in roads.items()
            },
            loops=loops,
            unreached=tuple(name for name in session.parameters if name in unreached),
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
            traced = session.trace(session.arguments(shard), index, lambda z: _rows(z, 0))
            part = vectors[done : done + traced.samples].to(traced.value)
            if part.shape != traced.z.shape:
                raise BadReduction(
                    f"vectors: expected shape {(sum(self._counts), *traced.z.shape[1:])}, got "
                    f"{tuple(vectors.shape)}"
                )
            for name, gradient in traced.pulled_back(part.reshape(traced.value.shape)).items():
                totals[name] = totals[name] + gradient if name in totals else gradient
            values.append(traced.z)
            done, outputs = done + traced.samples, traced.outputs
        return SampleResult(
            arrays=totals,
            values=torch.cat(values),
            samples=done,
            outputs=outputs,
            seconds=time.perf_counter() - start,
        )

    def _steps(self) -> Iterator[tuple[int, Shard]]:
        total = sum(self._counts)
        for index, shard in enumerate(self._inputs):
            if self._observer is not None:
                self._observer.step("samples", sum(self._counts[:index]), total)
            yield index, shard
        if self._observer is not None:
            self._observer.step("samples", total, total)

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

    def _chunks(self, outputs: int, each_bytes: int, collector: Collector) -> Iterator[range]:
        """Cut the outputs so that half the budget holds their gradients."""
        step = outputs if collector.whole else max(1, self._budget_bytes // 2 // max(1, each_bytes))
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


def _samples_of(inputs: Sequence[Shard], session: Session) -> list[int]:
    """Return how many samples each shard has."""
    if not len(inputs):
        raise BadInputs("inputs: expected one shard or more, got none")
    return [session.count(session.arguments(shard), index) for index, shard in enumerate(inputs)]
