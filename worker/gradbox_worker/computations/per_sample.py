"""`PerSampleGradient` and `Jacobian`: rows for every sample, or what they are reduced to.

Sections of the file beside `grads`: `samples/…` holds what there is one of for each sample,
`norms/NAME` the norms by parameter, `factors/…` the tensors that the terms in the metadata name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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
from gradbox_engine.per_sample.request import GradientReduction, JacobianReduction, Request
from gradbox_engine.ranges.samples import SampleRanges, SplitSamples, split_samples
from gradbox_factors import Factored, relative_error
from gradbox_worker.computations.dense_rows import DenseSink, Progress
from gradbox_worker.computations.engine_inputs import TensorSource, build_function
from gradbox_worker.computations.factors import described, stored_rows
from gradbox_worker.computations.job import Computed, LoadedJob
from gradbox_worker.computations.leading import ALONE
from gradbox_worker.computations.sections import GRADS, section

# The engine's budget is for pieces and, half as much, for the output gradients they are made of.
ENGINE_SHARE = 0.5

Spec = PerSampleGradientSpec | JacobianSpec


def compute_gradient(job: LoadedJob, spec: PerSampleGradientSpec) -> Computed:
    """Return dℓ_b/dθ of every sample."""
    rows, _ = sample_groups(job.groups, spec)
    answer: SampleResult
    if job.leading is not ALONE:
        answer = _split(job, spec)
    else:
        answer = per_sample_gradient(
            job.loaded.module,
            rows.shards,
            sample_loss(job, spec),
            loss_inputs=loss_inputs(spec, job.tensors),
            reduce=spec.reduce,
            clip=spec.clip,
            **_shared(job, spec),
        )
    values = {"samples/loss": answer.values, "samples/against_loss": answer.other_values}
    return _computed(spec, answer, values)


def compute_jacobian(job: LoadedJob, spec: JacobianSpec) -> Computed:
    """Return dz_by/dθ of every sample and output."""
    rows, others = sample_groups(job.groups, spec)
    answer: SampleResult
    if job.leading is not ALONE:
        answer = _split(job, spec)
    else:
        answer = jacobian(
            job.loaded.module,
            rows.shards,
            reduce=spec.reduce,
            vectors=vectors(spec, job.tensors),
            **_shared(job, spec),
        )
    values = {f"outputs/{rows.name}": answer.values}
    if others is not None:
        values[f"outputs/{others.name}"] = answer.other_values
    return _computed(spec, answer, values)


def sample_ranges(job: LoadedJob, spec: Spec) -> SampleRanges:
    """Return what any range of a job is run by on this device, the leader or another one."""
    rows, others = sample_groups(job.groups, spec)
    progress = Progress(job.observer)
    return SampleRanges(
        job.loaded.module,
        [rows] if others is None else [rows, others],
        _request(spec),
        loss=sample_loss(job, spec) if isinstance(spec, PerSampleGradientSpec) else None,
        observer=progress,
        check_number=check_number(job.work.spec_digest),
        budget_bytes=int(job.result_memory_bytes * ENGINE_SHARE),
        sink=_sink(job, spec, progress),
        checkpoints=job.checkpoints.of_samples,
        **how_called(spec, job.calls),
    )


def _split(job: LoadedJob, spec: Spec) -> SplitSamples:
    """Compute a job in ranges, on the devices that this one leads."""
    rows, others = sample_groups(job.groups, spec)
    against = None
    if spec.against is not None:
        against = stored_rows(job.work, of=spec.against, device=job.device)
    request = _request(spec, vectors=vectors(spec, job.tensors), against=against)
    request.check(
        GradientReduction if isinstance(spec, PerSampleGradientSpec) else JacobianReduction
    )
    own_parts = job.parts(rows.name, by_samples=_forms_rows(spec))
    other_parts = () if others is None else job.parts(others.name)
    own = sample_ranges(job, spec)
    devices = job.leading.sample_devices(own, device=job.device, rounding=job.rounding)
    return split_samples(
        own,
        devices,
        own_parts,
        request,
        loss_inputs=loss_inputs(spec, job.tensors),
        other_parts=other_parts,
        other_loss_inputs=other_loss_inputs(spec, job.tensors),
        observer=devices,
    )


def _request(spec: Spec, *, vectors: Any = None, against: Factored | None = None) -> Request:
    """Return what a job asks for, but for what a range's task says."""
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


def _forms_rows(spec: Spec) -> bool:
    """Return whether the devices make each sample's row, which does not depend on its length."""
    return spec.reduce == "projection" or (spec.reduce == "none" and spec.form == "dense")


def sample_loss(job: LoadedJob, spec: PerSampleGradientSpec) -> Callable[..., Tensor]:
    """Return the loss of each sample."""
    traced = spec.loss.function
    return build_function(traced, job.tensors, device=job.device, widened=spec.widened).function


def _sink(job: LoadedJob, spec: Spec, progress: Progress) -> DenseSink | None:
    """Return where rows go that may be dense, and are then written piece by piece."""
    if spec.form == "factored" or spec.reduce != "none":
        return None
    squeezed = isinstance(spec, PerSampleGradientSpec)
    return DenseSink(job.rows, job.rounding, progress, squeezed=squeezed)


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


def how_called(spec: Spec, calls: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the engine is told of the calls of the model.

    Args:
        calls: the job's `call_options`. Its rows' random numbers are always those of their shards.
    """
    named = {name: value for name, value in calls.items() if name != "streams"}
    return {**named, "wrt": spec.wrt, "unchecked": spec.unchecked}


def check_number(digest: str) -> float:
    """Return a number from 0 to 1 that a spec's digest names: a rerun is checked if the job was."""
    return int(digest[:8], 16) / 16**8


def _against(job: LoadedJob, spec: Spec, others: Group | None) -> Factored | OtherShards | None:
    if spec.against is not None:
        return stored_rows(job.work, of=spec.against, device=job.device)
    if others is None:
        return None
    return OtherShards(others.shards, other_loss_inputs(spec, job.tensors), others.streams)


def _shared(job: LoadedJob, spec: Spec) -> dict[str, Any]:
    _, others = sample_groups(job.groups, spec)
    called = calls(job, spec)
    return {
        **called,
        "form": spec.form,
        "dim": spec.dim,
        "kind": spec.kind,
        "against": _against(job, spec, others),
        "projection_seed": spec.seed,
        "checkpoints": job.checkpoints.whole() if job.checkpointed else None,
        "sink": _sink(job, spec, called["observer"]),
    }


def calls(job: LoadedJob, spec: Spec) -> dict[str, Any]:
    """Return how the engine calls the model for the rows, see its `Setting`."""
    rows, _ = sample_groups(job.groups, spec)
    return {
        "method": rows.method,
        "streams": rows.streams,
        **how_called(spec, job.calls),
        "observer": Progress(job.observer),
        "check_number": check_number(job.work.spec_digest),
        "budget_bytes": int(job.result_memory_bytes * ENGINE_SHARE),
    }


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
            "projection_dim": spec.dim,
            "projection_error": None if spec.dim is None else relative_error(spec.kind, spec.dim),
            "form": spec.form,
            "roads": {name: list(taken) for name, taken in answer.roads.items()},
            "loops": dict(answer.loops),
            "rows_compared": answer.rows_compared,
        },
        seconds={"samples": answer.seconds},
        recomputed=answer.recomputed,
        runs=answer.ranges if isinstance(answer, SplitSamples) else (),
    )
