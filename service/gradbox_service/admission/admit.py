"""The checks of a job: those that all computations share, and those of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from gradbox.errors import InvalidInputs
from gradbox.protocol import (
    EstimateView,
    ForwardSpec,
    GradientSpec,
    HessianProductSpec,
    InverseHessianSpec,
    JacobianSpec,
    JobSpec,
    MixedGradientSpec,
    ModelView,
    PerSampleGradientSpec,
    SharedSpec,
    StateSpec,
    StepSpec,
    StoreFitSpec,
    StoreQuerySpec,
    StoreRowsSpec,
)
from gradbox_service.admission import gradient, mixed_gradient, per_sample
from gradbox_service.admission.estimate import check_fits, estimate_key, may_be_estimated
from gradbox_service.admission.functions import check_readout
from gradbox_service.admission.model import check_groups, find_model
from gradbox_service.admission.parameters import check_weights, check_wrt
from gradbox_service.admission.tensors import Headers, TensorHeaders, references
from gradbox_service.fleet import Fleet, WorkerPresence
from gradbox_service.store.estimates import Estimates


class Check(Protocol):
    """Raises if a spec of one computation does not fit the model or its own tensors."""

    def __call__(self, spec: Any, *, model: ModelView, tensors: TensorHeaders) -> None: ...


# What is asked of one computation alone.
OWN: Final[Mapping[type[SharedSpec], Check]] = {
    GradientSpec: gradient.check,
    StepSpec: gradient.check,
    StateSpec: lambda spec, *, model, tensors: None,
    ForwardSpec: check_wrt,  # what its gradient jobs will differentiate
    PerSampleGradientSpec: per_sample.check_gradient,
    JacobianSpec: per_sample.check_jacobian,
    StoreRowsSpec: per_sample.check_gradient,
    StoreQuerySpec: per_sample.check_gradient,
    StoreFitSpec: per_sample.check_fit,
    MixedGradientSpec: mixed_gradient.check,
    HessianProductSpec: gradient.check_products,
    InverseHessianSpec: gradient.check_products,
}


@dataclass(frozen=True)
class AdmittedJob:
    """What is known of a job that the box can run.

    Attributes:
        estimate: what was measured of its like, if that was kept.
        estimate_key: under which what it finds is to be kept, of a job that estimates.
    """

    model: ModelView
    estimate: EstimateView | None = None
    estimate_key: str = ""


def admit(
    spec: JobSpec,
    *,
    workers: Sequence[WorkerPresence],
    fleet: Fleet,
    blobs: Headers,
    estimates: Estimates,
) -> AdmittedJob:
    """Return the model that the job will run on, and what was measured of its like.

    Raises:
        OutOfMemory: by that it fits no device of this box.
        UnknownModel: see `find_model`.
        ServiceUnavailable: no worker has said yet which models there are.
        InvalidJob: see `check_fit`.
    """
    model = find_model(spec.model, workers=workers, fleet=fleet)
    tensors = check_fit(spec, model=model, blobs=blobs)
    if not may_be_estimated(spec) or not (spec.estimate or estimates.any()):
        return AdmittedJob(model)
    key = estimate_key(spec, model=model, tensors=tensors)
    if spec.estimate:
        return AdmittedJob(model, estimate_key=key)
    kept = estimates.find(key)
    check_fits(kept, workers=workers)
    return AdmittedJob(model, kept)


def check_fit(spec: JobSpec, *, model: ModelView, blobs: Headers) -> TensorHeaders:
    """Check a job against the model that it will run on, wherever that is; return its headers.

    Raises:
        MissingBlobs: not every blob is there that the job names.
        GraphRefused: the loss, the readout or a penalty is not an allowed graph.
        InvalidInputs: names do not fit the model, the blobs or each other.
    """
    _check_group_names(spec)
    named = list(references(spec))
    shards = {shard.blob for group in spec.inputs for shard in group.shards}
    tensors = TensorHeaders.load(shards | {ref.blob for _, ref in named}, blobs=blobs)
    for where, reference in named:
        tensors.entry(reference, where=where)
    check_groups(spec, model=model, tensors=tensors)
    check_readout(spec)
    check_weights(spec, model=model, tensors=tensors)
    OWN[type(spec)](spec, model=model, tensors=tensors)
    return tensors


def _check_group_names(spec: JobSpec) -> None:
    names = [group.name for group in spec.inputs]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise InvalidInputs(f"inputs: group names must differ, got {twice} more than once")
