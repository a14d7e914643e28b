"""`Gradient` at cotangents: from the graphs that the forward job left, or by a replay.

A replay is compared with the forward job's outputs, which its result file has.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from gradbox.errors import InvalidInputs
from gradbox.protocol import CotangentsLoss, GradientSpec, StepSpec
from gradbox_engine import CotangentGradient, FirstOutputs
from gradbox_engine.model.calling.outputs import BARE, Outputs
from gradbox_engine.ranges import Range
from gradbox_engine.set_loss import split_gradient_at_cotangents
from gradbox_worker.computations.engine_inputs import TensorSource
from gradbox_worker.computations.held_jobs import held_gradient
from gradbox_worker.computations.job import Computed, LoadedJob
from gradbox_worker.computations.sections import input_gradients, section
from gradbox_worker.files.earlier_result import earlier_result, receipt_of
from gradbox_worker.work import Work

OUTPUTS = "outputs/"


def compute(job: LoadedJob, spec: GradientSpec, loss: CotangentsLoss) -> Computed:
    """Return dL/dθ from ∂L/∂Z.

    Raises:
        InvalidInputs: neither graphs nor the result of the forward job are there any more.
    """
    return computed(gradient(job, spec, loss), spec)


def gradient(
    job: LoadedJob, spec: GradientSpec | StepSpec, loss: CotangentsLoss
) -> CotangentGradient:
    """Return dL/dθ as the engine has it.

    Raises:
        InvalidInputs: neither graphs nor the result of the forward job are there any more.
    """
    parts = job.parts()
    first = _first_outputs(job, loss, parts)
    with held_gradient(job, spec) as held:
        return split_gradient_at_cotangents(
            job.leading.devices(held),
            parts,
            job.groups,
            _given_cotangents(loss, job.tensors),
            first,
            precision=spec.precision,
            device=held.device,
        )


def _first_outputs(job: LoadedJob, loss: CotangentsLoss, parts: Sequence[Range]) -> FirstOutputs:
    """Return what the forward job returned; from its file, unless its graphs here have it."""
    kept = job.kept.of(job.work) if parts[0].is_whole else None
    if kept is None:
        return first_outputs(job.work, loss.forward, job.device)
    # Records have the outputs, and the buffers that each shard began with.
    return FirstOutputs({}, kept.rows, stateful=False)


def _given_cotangents(loss: CotangentsLoss, tensors: TensorSource) -> dict[str, Outputs]:
    """Return ∂L/∂Z by group and name."""
    return _grouped({name: tensors.tensor(ref) for name, ref in loss.tensors.items()})


def computed(answer: CotangentGradient, spec: GradientSpec | StepSpec) -> Computed:
    """Return what stands in the result file."""
    return Computed(
        tensors={
            **section("grads", answer.grads if "grads" in spec.returns else {}),
            **section("input_grads", input_gradients(answer.input_grads)),
        },
        facts={
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


def first_outputs(work: Work, job_id: str, device: torch.device) -> FirstOutputs:
    """Read what the forward job returned.

    Raises:
        InvalidInputs: its result is not there any more, or damaged.
    """
    result = earlier_result(work)
    if result is None:
        raise InvalidInputs(
            f"expected the outputs of job {job_id}, which the cotangents belong to, but its result "
            f"is not on this box any more, or damaged on its disk; run the forward job again"
        )
    receipt = receipt_of(result)
    named = {
        name.removeprefix(OUTPUTS): result.tensor(name).to(device)
        for name in result.names
        if name.startswith(OUTPUTS)
    }
    return FirstOutputs(
        outputs=_grouped(named), rows=receipt.rows or {}, stateful=receipt.stateful is not False
    )


def _grouped(flat: Mapping[str, Tensor]) -> dict[str, Outputs]:
    """Take GROUP and GROUP/NAME apart."""
    groups: dict[str, Outputs] = {}
    for key, tensor in flat.items():
        group, _, name = key.partition("/")
        groups.setdefault(group, {})[name or BARE] = tensor
    return groups
