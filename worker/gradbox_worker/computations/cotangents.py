"""`Gradient` at cotangents: from the graphs that the forward job left, or by a replay.

A replay is compared with the forward job's outputs, which its result file has.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from gradbox.errors import InvalidInputs
from gradbox.protocol import CotangentsLoss, GradientSpec, Receipt
from gradbox.tensors.checksums import is_whole
from gradbox_engine import CotangentGradient, FirstOutputs, gradient_at_cotangents
from gradbox_engine.model.calling.outputs import BARE, Outputs
from gradbox_worker.computations.engine_inputs import TensorSource
from gradbox_worker.computations.job import Computed, LoadedJob
from gradbox_worker.computations.sections import input_gradients, section

OUTPUTS = "outputs/"


def compute(job: LoadedJob, spec: GradientSpec, loss: CotangentsLoss) -> Computed:
    """Return dL/dθ from ∂L/∂Z.

    Raises:
        InvalidInputs: neither graphs nor the result of the forward job are there any more.
    """
    first = job.kept.of(job.work)
    answer = gradient_at_cotangents(
        job.loaded.module,
        job.groups,
        given_cotangents(loss, job.tensors),
        first or first_outputs(job.work.earlier_result, loss.forward, job.device),
        wrt=spec.wrt,
        retain=spec.retain,
        input_grads="input_grads" in spec.returns,
        observer=job.observer,
        checkpoints=job.checkpoints,
        **job.calls,
    )
    return computed(answer, spec)


def given_cotangents(loss: CotangentsLoss, tensors: TensorSource) -> dict[str, Outputs]:
    """Return ∂L/∂Z by group and name."""
    return _grouped({name: tensors.tensor(ref) for name, ref in loss.tensors.items()})


def computed(answer: CotangentGradient, spec: GradientSpec) -> Computed:
    """Return what stands in the result file, however many devices computed it."""
    return Computed(
        tensors={
            **section("grads", answer.grads if "grads" in spec.returns else {}),
            **section("input_grads", input_gradients(answer.input_grads)),
        },
        facts={
            "shards_retained": answer.retained,
            "shards_replayed": answer.replayed,
            "replay_difference": answer.replay_difference,
            "names": tuple(answer.grads),
            "unreached": list(answer.unreached),
        },
        seconds=answer.seconds,
    )


def first_outputs(path: Path | None, job_id: str, device: torch.device) -> FirstOutputs:
    """Read what the forward job returned.

    Raises:
        InvalidInputs: its result is not there any more, or damaged.
    """
    try:
        if path is None or not is_whole(path):
            raise FileNotFoundError
        file: Any = safe_open(path, framework="pt", device=str(device))
    except FileNotFoundError:
        raise InvalidInputs(
            f"expected the outputs of job {job_id}, which the cotangents belong to, but its result "
            f"is not on this box any more, or damaged on its disk; run the forward job again"
        ) from None
    with file:
        receipt = Receipt.model_validate_json(file.metadata()["gradbox"])
        named = {
            name.removeprefix(OUTPUTS): file.get_tensor(name)
            for name in file.keys()  # noqa: SIM118 - the file is no mapping
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
