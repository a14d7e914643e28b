"""A job in two phases held open on this device, as the only one, as the leader or as another one.

    leading.devices    which devices run its ranges, of which this one runs some
    held               what a range is run by here: the model ready, and its graphs and sums

It is made of the spec and its blobs alone, so that it is the same on every device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor

from gradbox.protocol import ForwardSpec, GradientSpec, MixedGradientSpec, StepSpec
from gradbox_engine import Objective, Penalty
from gradbox_engine.mixed import held_mixed
from gradbox_engine.ranges import HeldJob
from gradbox_engine.requests import Returned
from gradbox_engine.set_loss import held_job
from gradbox_worker.computations.engine_inputs import (
    loss_parameters,
    mixed_inner,
    model_penalties,
)
from gradbox_worker.computations.job import LoadedJob


def held(job: LoadedJob) -> AbstractContextManager[HeldJob]:
    """Hold a job ready on a device that another one leads."""
    spec = job.work.spec
    if isinstance(spec, MixedGradientSpec):
        return held_mixed_gradient(job, spec, *mixed_inner(spec, job.tensors, device=job.device))
    if isinstance(spec, ForwardSpec):
        return held_forward(job, spec)
    assert isinstance(spec, GradientSpec)
    return held_gradient(job, spec, model_penalties(spec, job.tensors, device=job.device))


def held_gradient(
    job: LoadedJob, spec: GradientSpec | StepSpec, penalties: Sequence[Penalty] = ()
) -> AbstractContextManager[HeldJob]:
    """Hold a gradient ready, of a loss or at cotangents."""
    return held_job(
        job.loaded.module,
        job.groups,
        wrt=spec.wrt,
        loss_parameters=loss_parameters(spec),
        retain=spec.retain,
        returns=tuple(spec.returns),
        penalties=penalties,
        **_shared(job),
        graphs=job.kept.between_jobs(job.work),
    )


def held_forward(job: LoadedJob, spec: ForwardSpec) -> AbstractContextManager[HeldJob]:
    """Hold a first pass ready, whose graphs wait for a later job."""
    returns: tuple[Returned, ...] = ("buffers",)
    return held_job(
        job.loaded.module,
        job.groups,
        wrt=spec.wrt,
        retain=spec.retain,
        returns=returns,
        for_a_later_job=True,
        **_shared(job),
        graphs=job.kept.between_jobs(job.work),
    )


def held_mixed_gradient(
    job: LoadedJob, spec: MixedGradientSpec, inner: Objective, leaves: Mapping[str, Tensor]
) -> AbstractContextManager[HeldJob]:
    """Hold a mixed gradient ready; `leaves` are those of both functions."""
    (group,) = job.groups
    return held_mixed(job.loaded.module, group, inner, leaves, z=spec.z, **_shared(job))


def _shared(job: LoadedJob) -> dict[str, Any]:
    shared = {"observer": job.observer, **job.calls}
    return {**shared, "checkpoints": job.checkpoints.of} if job.checkpointed else shared
