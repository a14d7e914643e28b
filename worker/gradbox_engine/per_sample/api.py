"""Per-sample gradients and Jacobians of a list of shards: the two entry points.

    g_b   = dℓ_b/dθ,      ℓ = loss(z, **loss_inputs) of shape (B,), entry b of sample b alone
    J_by  = dz_by/dθ,     z of shape (B, ...), its further dims flattened to Y

Nothing is divided by B. Shard i runs under its own random stream, so masks are those of the
batched pass.
Cost: one forward and one backward without weight gradients for each shard (Y cotangents at once for
a Jacobian, in chunks within the budget), then the products.

Shapes: B samples over all shards, Y outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from gradbox_engine.checkpoint import Checkpoints
from gradbox_engine.per_sample.job import PerSampleJob
from gradbox_engine.per_sample.pieces import Sink
from gradbox_engine.per_sample.planning.model import callable_model
from gradbox_engine.per_sample.request import (
    Form,
    GradientReduction,
    JacobianReduction,
    OtherShards,
    Request,
    SampleResult,
)
from gradbox_engine.requests import Observer, Shard
from gradbox_factors import Factored, Kind

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
    kind: Kind = "sketch",
    seed: int = 0,
    projection_seed: int = 0,
    against: Factored | OtherShards | None = None,
    observer: Observer | None = None,
    checkpoints: Checkpoints | None = None,
    budget_bytes: int = BUDGET_BYTES,
    sink: Sink | None = None,
    **setting: Any,
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
        observer: called before each piece; may raise to stop the job.
        checkpoints: where the state of a long job is written, and read when it begins again.
        budget_bytes: memory for pieces of a dense result on their way to `sink`.
        sink: takes a dense result in pieces; without it arrays are returned.
        setting: mode, wrt, precision, output, readout, weights, method, unchecked, streams: see
            `callable_model`.

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
    with callable_model(model, seed=seed, others=_num_others(against), **setting) as ready:
        job = PerSampleJob(ready, request, inputs, observer, checkpoints, budget_bytes, sink)
        return job.gradients(loss, loss_inputs or {})


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
    observer: Observer | None = None,
    checkpoints: Checkpoints | None = None,
    budget_bytes: int = BUDGET_BYTES,
    sink: Sink | None = None,
    **setting: Any,
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
    with callable_model(model, seed=seed, others=_num_others(against), **setting) as ready:
        job = PerSampleJob(ready, request, inputs, observer, checkpoints, budget_bytes, sink)
        return job.jacobians()


def _num_others(against: Factored | OtherShards | None) -> int:
    return len(against.inputs) if isinstance(against, OtherShards) else 0
