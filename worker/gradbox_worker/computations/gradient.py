"""`Gradient`: the loss, its gradients, and what else was asked for."""

from __future__ import annotations

from collections.abc import Collection, Mapping

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
from gradbox_worker.computations.sections import by_group, input_gradients, section


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
            loss.objective,
            returns=tuple(spec.returns),
            device=held.device,
            observer=job.observer,
            penalties=penalties,
            **job.calls,
        )


def computed(answer: SetGradient, spec: GradientSpec | StepSpec, loss: Loss) -> Computed:
    """Return what stands in the result file."""
    tensors = _tensors(answer, spec.returns)
    if loss.has_buffers and "buffers" in spec.returns:
        tensors |= section("loss_buffers", loss.buffers())
    return Computed(
        tensors=tensors,
        facts={
            "loss": answer.loss,
            "shards_retained": answer.retained,
            "shards_replayed": answer.replayed,
            "replay_difference": answer.replay_difference,
            "names": tuple(answer.grads) if "grads" in spec.returns else (),
            "unreached": list(answer.unreached),
        },
        seconds=answer.seconds,
        recomputed=answer.recomputed,
        runs=answer.ranges,
    )


def _tensors(answer: SetGradient, returns: Collection[str]) -> dict[str, Tensor]:
    """Name the tensors as they stand in the file.

    Gradients of inputs are there if they were computed: naming inputs in `wrt` asks for them too.
    """
    sections: dict[str, Mapping[str, Tensor]] = {
        "grads": answer.grads,
        "buffers": answer.buffers or {},
        "outputs": by_group(answer.outputs or {}),
        "cotangents": by_group(answer.cotangents or {}),
        "input_grads": input_gradients(answer.input_grads),
    }
    named: dict[str, Tensor] = {}
    for name, tensors in sections.items():
        if name in returns or name == "input_grads":
            named |= section(name, tensors)
    return named
