"""Per-sample gradients and Jacobians of a list of shards: the entry points.

    g_b   = dℓ_b/dθ,      ℓ = loss(z, **loss_inputs) of shape (B,), entry b of sample b alone
    J_by  = dz_by/dθ,     z of shape (B, ...), its further dims flattened to Y

Nothing is divided by B. Shard i runs under its own random stream, so masks are those of the
batched pass.
Cost: one forward and one backward without weight gradients for each shard (Y cotangents at once for
a Jacobian, in chunks within the budget), then the products.

Shapes: B samples over all shards, Y outputs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypedDict, Unpack

from torch import Tensor, nn

from gradbox_engine.checkpoint import Checkpoints
from gradbox_engine.model.calling.shard_feed import Position
from gradbox_engine.per_sample.job import BUDGET_BYTES, PerSampleJob
from gradbox_engine.per_sample.pieces import Sink
from gradbox_engine.per_sample.planned_model import PlannedModel
from gradbox_engine.per_sample.planning.model import callable_model
from gradbox_engine.per_sample.reductions import Collector
from gradbox_engine.per_sample.request import (
    Form,
    GradientReduction,
    JacobianReduction,
    OtherShards,
    Request,
    SampleResult,
)
from gradbox_engine.per_sample.sample_loss import check_given_apart
from gradbox_engine.requests import (
    SOLE_GROUP,
    Group,
    Mode,
    Observer,
    Phase,
    Precision,
    Shard,
    Silent,
)
from gradbox_factors import Factored, Kind

AGAINST = "against"
"""What messages call the group of other shards."""


class Setting(TypedDict, total=False):
    """How a job calls the model, see `CallOptions`, and how it runs."""

    mode: Mode
    precision: Precision
    output: str | int | None
    readout: Callable[[Any, dict[str, Any]], Any] | None
    weights: Mapping[str, Tensor] | None
    wrt: Sequence[str] | None
    unchecked: Sequence[str]  # checks to leave out, see `callable_model`
    method: str  # the model's, which is called
    streams: Sequence[tuple[int, int]] | None  # the numbers (k, i) that each shard's random stream
    # is derived from; by default 0 and the shard's
    observer: Observer | None  # called before each piece; may raise to stop the job
    checkpoints: Checkpoints | None  # where a long job's state is written, and read to go on
    check_number: float  # from 0, the default, to 1: under plans that earlier jobs confirmed a row
    # is compared if this is less than a 64th of the samples, see `shard_run`
    budget_bytes: int  # memory for pieces of a dense result on their way to `sink`
    sink: Sink | None  # takes a dense result in pieces; without it arrays are returned


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
    kind: Kind = "sketch",
    seed: int = 0,
    projection_seed: int = 0,
    against: Factored | OtherShards | None = None,
    **setting: Unpack[Setting],
) -> SampleResult:
    """Compute dℓ_b/dθ for every sample b.

        found = per_sample_gradient(model, [{"0": x}], lambda z: z.square().sum(1))
        found.arrays["weight"]  # (B, *shape)

    Args:
        inputs: shards, each {argument name: value}; whole numbers are positions.
        loss: (z, **loss_inputs) → (B,), entry b read from row b of z alone.
        loss_inputs: tensors with one row a sample over all shards are cut with the shards; what
            else there is goes whole.
        reduce: "none", or what the rows are reduced to; see `SampleResult`.
        form: of rows that are not reduced: "dense", "factored", or "auto", the smaller one of both
            for each layer.
        clip: the largest norm that `clipped_sum` lets through.
        dim: the length of a `projection`, which `projection_seed` names; `kind` is its matrix.
        seed: of the random streams of the shards.
        against: rows J' of an earlier call, by the same parameters, or shards to make them of: a
            `gram` is then J J'ᵀ.
        setting: see `Setting`.

    Returns:
        What `reduce` asks for: rows (B, *shape) by parameter, arrays or factors as `form` says, or
        what they are reduced to.

    Raises:
        BadReduction: the arguments do not fit together.
        BadSampleLoss: the loss does not have shape (B,), or couples samples.
        CoupledSamples: the model lets one sample see another.
    """
    request = Request(reduce, form, clip, dim, projection_seed, against=against, kind=kind)
    request.check(GradientReduction)
    return _run(model, inputs, request, loss, loss_inputs or {}, seed=seed, **setting)


def jacobian(
    model: nn.Module,
    inputs: Sequence[Shard],
    *,
    reduce: JacobianReduction = "none",
    form: Form = "dense",
    vectors: Any = None,
    dim: int | None = None,
    kind: Kind = "sketch",
    seed: int = 0,
    projection_seed: int = 0,
    against: Factored | OtherShards | None = None,
    **setting: Unpack[Setting],
) -> SampleResult:
    """Compute dz_by/dθ for every sample b and output y, the dims of z behind the first being Y.

    Arguments that are not described here are those of `per_sample_gradient`.

    Args:
        vectors: for `vjp` cotangents shaped like z over all shards; for `jvp` a tangent by
            parameter name, 0 for names left out.
        against: as for `per_sample_gradient`; with it a `vjp` is J' Jᵀ u.

    Returns:
        What `per_sample_gradient` does, with rows (B, Y, *shape).

    Raises:
        BadReduction: the arguments do not fit together, or `vectors` does not fit z or θ.
        CoupledSamples: the model lets one sample see another.
    """
    request = Request(reduce, form, None, dim, projection_seed, vectors, against, kind)
    request.check(JacobianReduction)
    return _run(model, inputs, request, None, {}, seed=seed, **setting)


def collect(
    model: nn.Module,
    inputs: Sequence[Shard],
    loss: Callable[..., Tensor],
    collector: Collector,
    *,
    loss_inputs: Mapping[str, Any] | None = None,
    seed: int = 0,
    **setting: Unpack[Setting],
) -> SampleResult:
    """Give the terms of dℓ_b/dθ to a collector, shard after shard; as `per_sample_gradient`."""
    request = Request("projection", "dense", dim=1)  # which is not read: the collector is given
    given = loss_inputs or {}
    return _run(model, inputs, request, loss, given, seed=seed, collector=collector, **setting)


def _run(
    model: nn.Module,
    inputs: Sequence[Shard],
    request: Request,
    loss: Callable[..., Tensor] | None,
    loss_inputs: Mapping[str, Any],
    *,
    method: str = "forward",
    streams: Sequence[tuple[int, int]] | None = None,
    observer: Observer | None = None,
    checkpoints: Checkpoints | None = None,
    check_number: float = 0.0,
    budget_bytes: int = BUDGET_BYTES,
    sink: Sink | None = None,
    collector: Collector | None = None,
    **setting: Any,
) -> SampleResult:
    """Run a job, and before it one that keeps the factors of other shards, where there are some."""
    observer = observer or Silent()
    others = request.against if isinstance(request.against, OtherShards) else None
    groups = [Group(SOLE_GROUP, inputs, method, streams=streams)]
    if others is not None:
        groups.append(Group(AGAINST, others.inputs, method, streams=others.streams))
    with callable_model(model, groups, **setting) as ready:
        planned = PlannedModel(ready, check_number)
        job = partial(PerSampleJob, planned, loss=loss, budget_bytes=budget_bytes)
        own = [Position(0, shard) for shard in range(len(inputs))]
        of_own = partial(job, own, loss_inputs=loss_inputs, sink=sink, collector=collector)
        if others is None:
            found = of_own(request, observer=observer, checkpoints=checkpoints).run()
            observer.step("samples", found.samples, found.samples)
            return found
        start = time.perf_counter()
        theirs = [Position(1, shard) for shard in range(len(others.inputs))]
        counts = [sum(map(planned.count, positions)) for positions in (theirs, own)]
        if loss is not None:
            check_given_apart(loss_inputs, others.loss_inputs, counts)
        first = job(
            theirs,
            Request("none", "smaller"),
            loss_inputs={**loss_inputs, **others.loss_inputs},
            observer=_Both(observer, 0, sum(counts)),
        )
        rows = first.run()  # again after a crash, for a checkpoint has those of the second job
        second = of_own(
            replace(request, against=rows.factors),
            observer=_Both(observer, counts[0], sum(counts)),
            checkpoints=checkpoints,
        )
        found = second.run()
        observer.step("samples", sum(counts), sum(counts))
        return replace(found, other_values=rows.values, seconds=time.perf_counter() - start)


@dataclass(frozen=True)
class _Both:
    """Tells an observer of two jobs how far one of them has come."""

    observer: Observer
    before: int  # samples of the other one, if it is done
    total: int

    def step(self, phase: Phase, done: int, total: int) -> None:
        self.observer.step(phase, self.before + done, self.total)
