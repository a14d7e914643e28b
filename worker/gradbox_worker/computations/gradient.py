"""`Gradient`: the loss, its gradients, and what else was asked for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor

from gradbox.protocol import CotangentsLoss, GradientSpec, StepSpec
from gradbox_engine import SetGradient
from gradbox_engine.set_loss import split_set_gradient
from gradbox_worker.computations import cotangents
from gradbox_worker.computations.engine_inputs import (
    Loss,
    gradient_loss,
    model_penalties,
)
from gradbox_worker.computations.held_jobs import held_gradient
from gradbox_worker.computations.job import Computed, LoadedJob
from gradbox_worker.computations.sections import by_group, section


def compute(job: LoadedJob, spec: GradientSpec) -> Computed:
    """Return dL/dθ."""
    if isinstance(spec.loss, CotangentsLoss):
        return cotangents.compute(job, spec, spec.loss)
    loss = gradient_loss(spec, job.tensors, device=job.device)
    return computed(gradient(job, spec, loss), spec, loss)


def gradient(job: LoadedJob, spec: GradientSpec | StepSpec, loss: Loss) -> SetGradient:
    """Return dL/dθ as the engine has it."""
    penalties = model_penalties(spec, job.tensors, device=job.device)
    parts = job.parts()
    with held_gradient(job, spec, penalties) as held:
        return split_set_gradient(
            job.leading.devices(held),
            parts,
            job.groups,
            job.resized(loss.objective),
            returns=tuple(spec.returns),
            device=held.device,
            observer=job.observer,
            penalties=penalties,
            **job.calls,
        )


def computed(answer: SetGradient, spec: GradientSpec | StepSpec, loss: Loss) -> Computed:
    """Return what stands in the result file."""
    base = cotangents.computed(answer, spec)
    sections: dict[str, Mapping[str, Tensor]] = {
        "buffers": answer.buffers or {},
        "outputs": by_group(answer.outputs or {}),
        "cotangents": by_group(answer.cotangents or {}),
    }
    tensors = dict(base.tensors)
    for name in [n for n in sections if n in spec.returns]:  # a step has its buffers for the run
        tensors |= section(name, sections[name])
    if "buffers" in spec.returns:
        tensors |= section("loss_buffers", loss.buffers())
    return replace(base, tensors=tensors, facts={**base.facts, "loss": answer.loss})
