"""What each computation asks of the engine, and what its answer becomes in a result file.

The functions here build a job's parts at once and return the job itself, to be run with an
observer: reading and building count as loading.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gradbox.protocol import GradientSpec, JobSpec, MixedGradientSpec
from gradbox_engine import Observer, mixed_gradient, set_gradient
from gradbox_engine.job import Phase
from gradbox_worker.blob_tensors import BlobTensors
from gradbox_worker.job_parts import (
    differentiated,
    input_groups,
    loss_objective,
    mixed_objectives,
    model_penalties,
    model_readout,
)
from gradbox_worker.models.registry import Loaded
from gradbox_worker.result_file import result_tensors

DFDZ = "dfdz/dfdz"


@dataclass(frozen=True)
class Outcome:
    """The tensors of a result file by SECTION/NAME, and the receipt's fields about them."""

    tensors: dict[str, Tensor]
    manifest: dict[str, Any]
    seconds: dict[Phase, float]


Run = Callable[[Observer], Outcome]


def computation(
    spec: JobSpec, loaded: Loaded, tensors: BlobTensors, *, device: torch.device
) -> Run:
    """Return the job of a spec.

    Raises:
        GradboxError: the job's parts do not fit the model or each other.
    """
    if isinstance(spec, MixedGradientSpec):
        return _mixed_gradient(spec, loaded, tensors, device=device)
    return _gradient(spec, loaded, tensors, device=device)


def _gradient(
    spec: GradientSpec, loaded: Loaded, tensors: BlobTensors, *, device: torch.device
) -> Run:
    groups = input_groups(spec, loaded, tensors)
    objective = loss_objective(spec, tensors, device=device)
    terms = _terms(spec, tensors, device=device)
    penalties = model_penalties(spec, tensors, device=device)

    def run(observer: Observer) -> Outcome:
        answer = set_gradient(
            loaded.module,
            groups,
            objective,
            wrt=differentiated(spec),
            penalties=penalties,
            retain=spec.retain,
            returns=tuple(spec.returns),
            observer=observer,
            **terms,
        )
        manifest = {
            "loss": answer.loss,
            "shards": answer.shards,
            "shards_retained": answer.retained,
            "shards_replayed": answer.replayed,
            "replay_difference": answer.replay_difference,
            "names": tuple(answer.grads),
            "unreached": list(answer.unreached),
        }
        return Outcome(result_tensors(answer, spec.returns), manifest, answer.seconds)

    return run


def _mixed_gradient(
    spec: MixedGradientSpec, loaded: Loaded, tensors: BlobTensors, *, device: torch.device
) -> Run:
    (group,) = input_groups(spec, loaded, tensors)
    inner, outer = mixed_objectives(spec, tensors, device=device)
    terms = _terms(spec, tensors, device=device)

    def run(observer: Observer) -> Outcome:
        answer = mixed_gradient(
            loaded.module,
            group,
            inner,
            outer,
            z=spec.z,
            returns=tuple(spec.returns),
            observer=observer,
            **terms,
        )
        manifest = {
            "loss": answer.value,
            "shards": answer.shards,
            "shards_retained": 0,
            "shards_replayed": answer.tangents,
            "replay_difference": answer.replay_difference,
            "fallbacks": answer.fallbacks,
            "names": tuple(answer.grads),
            "unreached": list(answer.unreached),
        }
        named = {f"grads/{name}": gradient for name, gradient in answer.grads.items()}
        if answer.dfdz is not None:
            named[DFDZ] = answer.dfdz
        return Outcome(named, manifest, answer.seconds)

    return run


def _terms(spec: JobSpec, tensors: BlobTensors, *, device: torch.device) -> dict[str, Any]:
    """Return what every computation tells the engine."""
    return {
        "seed": spec.seed,
        "mode": spec.mode,
        "precision": spec.precision,
        "output": spec.output,
        "readout": model_readout(spec, tensors, device=device),
        "weights": {name: tensors.tensor(ref) for name, ref in spec.weights.items()} or None,
        "streams": spec.streams,
    }
