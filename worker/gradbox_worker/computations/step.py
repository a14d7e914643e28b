"""A step of a run: `Gradient` at the run's weights, then its optimizer's update.

    at the state n - 1:   g = dL/dθ, dL/dφ       θ the model's parameters, φ those of the loss
    then:                 θ, φ, moments, buffers of state n

Until the update begins, the state is only read, so a job that fails or is stopped leaves it as it
was. From there until the result file is in its place the state is marked as doubtful, and forgotten
if anything fails.

A loss may bring parameters of its own, `loss.NAME`, or tensors that require grad,
`loss_inputs.NAME`. At the first step that has them their numbers are those that were posted; from
then on they are the state's, whatever is posted, and so are the buffers of a loss.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

from safetensors import safe_open
from torch import Tensor, nn

from gradbox.errors import InvalidInputs
from gradbox.protocol import CotangentsLoss, Receipt, StepSpec
from gradbox_engine import SetGradient
from gradbox_engine.errors import GradientNotFinite
from gradbox_engine.model.tensor_equality import same_values
from gradbox_engine.model.weights import wide_dtype
from gradbox_engine.optimize import Updated
from gradbox_engine.requests import CotangentGradient
from gradbox_worker.computations import cotangents, gradient
from gradbox_worker.computations.engine_inputs import (
    Loss,
    built_readout,
    gradient_loss,
    input_groups,
)
from gradbox_worker.computations.job import Computed, LoadedJob
from gradbox_worker.runs import HeldRun, KeptStep
from gradbox_worker.work import StepMade

BUFFERS: Final = "buffers/"
OF_LOSS: Final = "loss/"
"""Begins the names of a loss's buffers, in a state; no name of a model's buffer begins so."""


def compute(job: LoadedJob, spec: StepSpec) -> Computed:
    """Return what a step was and what of its gradient is asked for; the run's state is the next."""
    assert job.run is not None
    answer, loss, updated = _make(job, job.run, spec)
    if isinstance(answer, SetGradient):
        assert loss is not None
        computed = gradient.computed(answer, spec, loss)
    else:
        computed = cotangents.computed(answer, spec)
    made = {
        "run": spec.run,
        "step": updated.step,
        "grad_norm": updated.grad_norm,
        "lr": job.run.state.rates,
    }
    return replace(computed, facts={**computed.facts, **made})


def made(computed: Computed) -> StepMade | None:
    """Return what a run's record takes of a job, None of one that was no step."""
    facts = computed.facts
    if "step" not in facts:
        return None
    return StepMade(
        run=facts["run"],
        number=facts["step"],
        loss=facts.get("loss"),
        grad_norm=facts["grad_norm"],
        lr=facts["lr"],
    )


def again(job: LoadedJob, held: HeldRun, kept: KeptStep) -> None:
    """Make a step that was made before, in the place of the job that needs its state."""
    spec = kept.spec
    work = replace(
        job.work, job_id=kept.job, spec=spec, earlier_result=kept.earlier_result, attempt=1
    )
    readout = built_readout(spec, job.tensors, device=job.device)
    groups = input_groups(spec, job.loaded.methods, job.tensors)
    weights = {name: job.tensors.shared(ref) for name, ref in spec.weights.items()}
    alike = replace(
        job, work=work, groups=groups, readout=readout, weights=weights, checkpointed=False
    )
    _make(at(alike, held), held, spec)
    held.resident.job, held.resident.doubtful = kept.job, False


def at(job: LoadedJob, held: HeldRun) -> LoadedJob:
    """Return a job on a run's state; weights of the job's own lie over it."""
    numbers = held.numbers(widened=job.work.spec.widened)
    return replace(
        job,
        loaded=replace(job.loaded, module=held.module),
        weights={**numbers, **job.weights},
        run=held,
    )


def _make(
    job: LoadedJob, held: HeldRun, spec: StepSpec
) -> tuple[CotangentGradient, Loss | None, Updated]:
    """Compute a step's gradient and update the state, which is doubtful from there on."""
    state = held.state
    loss, posted = None, dict[str, Tensor]()
    answer: CotangentGradient
    if isinstance(spec.loss, CotangentsLoss):
        buffers = _after_forward(job.work.earlier_result, spec)
        of_run = spec.model_copy(update={"wrt": held.wrt})
        answer = cotangents.gradient(job, of_run, spec.loss)
    else:
        of_loss = {n: b.clone() for n, b in state.buffers.items() if n.startswith(OF_LOSS)}
        answer, loss, posted = _set_gradient(job, held, spec, of_loss)
        buffers = _changed(held.module, answer.buffers or {})
        buffers |= of_loss | {f"{OF_LOSS}{name}": b for name, b in loss.buffers().items()}
    if state.num_steps == 0:  # all that the run trains is known now
        state.check_groups(posted)
    kept = "grads" in spec.returns  # as they are computed, which an update may change
    grads = {name: g.clone() for name, g in answer.grads.items()} if kept else answer.grads
    held.resident.doubtful = True
    state.adopt(posted)
    try:
        updated = state.step(
            grads,
            unreached={*answer.unreached, *(state.weights.keys() - grads.keys())},
            lr=spec.lr,
            clip_norm=spec.clip_norm,
            clip_value=spec.clip_value,
        )
    except GradientNotFinite:
        held.resident.doubtful = bool(posted)  # else nothing has changed
        raise
    state.buffers = buffers
    return answer, loss, updated


def _set_gradient(
    job: LoadedJob, held: HeldRun, spec: StepSpec, of_loss: Mapping[str, Tensor]
) -> tuple[SetGradient, Loss, dict[str, Tensor]]:
    """Compute a step's gradient.

    Args:
        of_loss: the state's buffers of the loss, which that may change.

    Returns:
        And the loss, and those of its parameters that the state does not have yet.
    """
    own = dict(held.state.weights)
    own |= {f"loss.{name.removeprefix(OF_LOSS)}": buffer for name, buffer in of_loss.items()}
    loss = gradient_loss(spec, job.tensors, device=job.device, own=own)
    posted = {n: p for n, p in loss.objective.parameters.items() if n not in own}
    returns = sorted({*spec.returns, "buffers"})
    of_run = spec.model_copy(update={"wrt": held.wrt, "returns": returns})
    return gradient.gradient(job, of_run, loss), loss, posted


def gradient_alone(job: LoadedJob, spec: StepSpec) -> Computed:
    """Return a step's gradient, of which nothing becomes; the run's state stays."""
    assert job.run is not None
    buffers = job.run.state.buffers
    of_loss = {n: b.clone() for n, b in buffers.items() if n.startswith(OF_LOSS)}
    answer, loss, _ = _set_gradient(job, job.run, spec, of_loss)
    return gradient.computed(answer, spec, loss)


def _changed(module: nn.Module, buffers: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the buffers that are not as registered.

    Raises:
        InvalidInputs: one of them cannot be laid over the registered one.
    """
    registered = dict(module.named_buffers(remove_duplicate=False))
    found = {}
    for name, buffer in buffers.items():
        before = registered.get(name)
        if before is None or before.shape != buffer.shape:
            raise InvalidInputs(
                f"buffer {name!r}: expected the shape that it is registered with, "
                f"{'none' if before is None else tuple(before.shape)}, got {tuple(buffer.shape)} "
                f"after the step, which the next could not begin with; let the model set it anew "
                f"in each call, as a plain attribute"
            )
        wide = before.to(wide_dtype(before.dtype) if buffer.dtype != before.dtype else before.dtype)
        if not same_values(buffer, wide):
            found[name] = buffer
    return found


def _after_forward(path: Path | None, spec: StepSpec) -> dict[str, Tensor]:
    """Return the buffers that the forward job of a step's cotangents left, as a state has them.

    Raises:
        InvalidInputs: its result is not there any more, it ran on another state of the run, or it
            changed buffers and did not return them.
    """
    assert isinstance(spec.loss, CotangentsLoss)
    named = f"the forward job {spec.loss.forward} of the step's cotangents"
    try:
        if path is None:
            raise FileNotFoundError
        with safe_open(path, framework="pt") as file:
            receipt = Receipt.model_validate_json(file.metadata()["gradbox"])
            names = [name for name in file.keys() if name.startswith(BUFFERS)]  # noqa: SIM118
            buffers = {n.removeprefix(BUFFERS): file.get_tensor(n).clone() for n in names}
    except FileNotFoundError:
        raise InvalidInputs(
            f"expected the result of {named}, but it is not on this box any more; run it again"
        ) from None
    if (receipt.state_run, receipt.state_step) != (spec.run, spec.number - 1):
        raise InvalidInputs(
            f"expected {named} to have run on step {spec.number - 1} of run {spec.run}, got "
            f"{f'step {receipt.state_step} of {receipt.state_run}' if receipt.state_run else 'no'} "
            f"run; call the run's model again at its newest step"
        )
    if receipt.stateful is not False and not buffers:
        raise InvalidInputs(
            f"expected {named} to return the buffers that it changed, got none; ask it for them "
            f"(returns=['outputs', 'buffers'])"
        )
    return buffers
