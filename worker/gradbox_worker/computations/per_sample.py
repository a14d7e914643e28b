"""`PerSampleGradient` and `Jacobian`: rows for every sample, or what they are reduced to.

Sections of the file beside `grads`: `samples/…` holds what there is one of for each sample,
`norms/NAME` the norms by parameter, `factors/…` the tensors that the terms in the metadata name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from gradbox.protocol import JacobianSpec, PerSampleGradientSpec, TensorRef
from gradbox_engine import Group
from gradbox_engine.per_sample import (
    OtherShards,
    SampleResult,
    jacobian,
    per_sample_gradient,
)
from gradbox_factors import Factored, relative_error
from gradbox_worker.computations.dense_rows import DenseSink, Progress
from gradbox_worker.computations.engine_inputs import TensorSource, build_function
from gradbox_worker.computations.factors import described, stored_rows
from gradbox_worker.computations.job import Computed, LoadedJob
from gradbox_worker.computations.sections import GRADS, section

# The engine's budget is for pieces and, half as much, for the output gradients they are made of.
ENGINE_SHARE = 0.5

Spec = PerSampleGradientSpec | JacobianSpec


def compute_gradient(job: LoadedJob, spec: PerSampleGradientSpec) -> Computed:
    """Return dℓ_b/dθ of every sample."""
    rows, _ = sample_groups(job.groups, spec)
    answer = per_sample_gradient(
        job.loaded.module,
        rows.shards,
        build_function(
            spec.loss.function, job.tensors, device=job.device, widened=spec.widened
        ).function,
        loss_inputs=loss_inputs(spec, job.tensors),
        reduce=spec.reduce,
        clip=spec.clip,
        **_shared(job, spec, squeezed=True),
    )
    return computed_gradient(answer, spec)


def compute_jacobian(job: LoadedJob, spec: JacobianSpec) -> Computed:
    """Return dz_by/dθ of every sample and output."""
    rows, others = sample_groups(job.groups, spec)
    answer = jacobian(
        job.loaded.module,
        rows.shards,
        reduce=spec.reduce,
        vectors=vectors(spec, job.tensors),
        **_shared(job, spec, squeezed=False),
    )
    return computed_jacobian(answer, spec, rows, others)


def sample_groups(groups: Sequence[Group], spec: Spec) -> tuple[Group, Group | None]:
    """Return the group whose rows are wanted, and the one whose rows they are multiplied with."""
    named = {group.name: group for group in groups}
    others = None if spec.against_group is None else named.pop(spec.against_group)
    (rows,) = named.values()
    return rows, others


def loss_inputs(spec: Spec, tensors: TensorSource) -> dict[str, Any] | None:
    """Return what the loss reads; None where there is none."""
    if isinstance(spec, JacobianSpec):
        return None
    return {
        name: tensors.tensor(value) if isinstance(value, TensorRef) else value
        for name, value in spec.loss_inputs.items()
    }


def other_loss_inputs(spec: Spec, tensors: TensorSource) -> dict[str, Tensor]:
    """Return what the loss reads for the other shards."""
    given = spec.against_loss_inputs if isinstance(spec, PerSampleGradientSpec) else {}
    return {name: tensors.tensor(ref) for name, ref in given.items()}


def vectors(spec: Spec, tensors: TensorSource) -> Any:
    """Return the cotangents of a vjp, or the tangents of a jvp by parameter; None for others."""
    if isinstance(spec, PerSampleGradientSpec) or spec.vectors is None:
        return None
    if isinstance(spec.vectors, TensorRef):
        return tensors.tensor(spec.vectors)
    return {name: tensors.tensor(ref) for name, ref in spec.vectors.items()}


def rows_go_to_file(spec: Spec) -> bool:
    """Return whether rows may be dense, and are then written to the result file piece by piece."""
    return spec.form != "factored" and spec.reduce == "none"


def how_called(spec: Spec, calls: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the engine is told of the calls of the model.

    Args:
        calls: the job's `call_options`. Its rows' random numbers are always those of their shards.
    """
    named = {name: value for name, value in calls.items() if name != "streams"}
    return {**named, "wrt": spec.wrt, "unchecked": spec.unchecked}


def _against(job: LoadedJob, spec: Spec, others: Group | None) -> Factored | OtherShards | None:
    if spec.against is not None:
        return stored_rows(job.work.earlier_result, of=spec.against, device=job.device)
    if others is None:
        return None
    return OtherShards(others.shards, other_loss_inputs(spec, job.tensors), others.streams)


def _shared(job: LoadedJob, spec: Spec, *, squeezed: bool) -> dict[str, Any]:
    progress = Progress(job.observer)
    rows, others = sample_groups(job.groups, spec)
    sink = None
    if rows_go_to_file(spec):
        sink = DenseSink(job.result, job.rounding, progress, squeezed=squeezed)
    return {
        "form": spec.form,
        "dim": spec.dim,
        "kind": spec.kind,
        "against": _against(job, spec, others),
        "method": rows.method,
        "streams": rows.streams,
        "projection_seed": spec.seed,
        **how_called(spec, job.calls),
        "observer": progress,
        "checkpoints": job.checkpoints,
        "budget_bytes": int(job.result_memory_bytes * ENGINE_SHARE),
        "sink": sink,
    }


def computed_gradient(answer: SampleResult, spec: PerSampleGradientSpec) -> Computed:
    """Return what stands in the result file, however many devices computed it."""
    values = {"samples/loss": answer.values, "samples/against_loss": answer.other_values}
    return _computed(spec, answer, values)


def computed_jacobian(
    answer: SampleResult, spec: JacobianSpec, rows: Group, others: Group | None
) -> Computed:
    """Return what stands in the result file, however many devices computed it."""
    values = {f"outputs/{rows.name}": answer.values}
    if others is not None:
        values[f"outputs/{others.name}"] = answer.other_values
    return _computed(spec, answer, values)


def _computed(
    spec: Spec,
    answer: SampleResult,
    values: Mapping[str, Tensor | None],
) -> Computed:
    tensors = {name: value for name, value in values.items() if value is not None}
    metadata: Mapping[str, str] = {}
    if spec.reduce == "clipped_sum" or (
        spec.reduce == "vjp" and (spec.against or spec.against_group) is None
    ):
        tensors |= section(GRADS, answer.arrays)
    else:
        tensors |= section("samples", answer.arrays)
    if spec.reduce == "gram_trace":
        tensors["samples/gram_trace"] = tensors.pop("samples/gram")
    if spec.reduce == "clipped_sum":
        tensors["samples/norm"] = answer.parameter_norms[""]
    else:
        tensors |= section("norms", answer.parameter_norms)
    if answer.factors is not None:
        named, metadata = described(answer.factors)
        tensors |= named
    return Computed(
        tensors=tensors,
        metadata=metadata,
        facts={
            "names": answer.names,
            "unreached": list(answer.unreached),
            "samples": answer.samples,
            "outputs": answer.outputs,
            "reduce": spec.reduce,
            "against": spec.against,
            "against_group": spec.against_group,
            "projection_kind": None if spec.dim is None else spec.kind,
            "projection_error": None if spec.dim is None else relative_error(spec.kind, spec.dim),
            "form": spec.form,
            "roads": {name: list(taken) for name, taken in answer.roads.items()},
            "loops": dict(answer.loops),
        },
        seconds={"samples": answer.seconds},
    )
