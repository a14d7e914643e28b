"""`MixedGradient`: dt/dy, and dfdz if it was asked for."""

from __future__ import annotations

from gradbox.protocol import MixedGradientSpec
from gradbox_engine import mixed_gradient
from gradbox_engine.requests import MixedResult
from gradbox_worker.computations.engine_inputs import mixed_objectives
from gradbox_worker.computations.job import Computed, LoadedJob
from gradbox_worker.computations.sections import section


def compute(job: LoadedJob, spec: MixedGradientSpec) -> Computed:
    """Return dt/dy."""
    (group,) = job.groups
    inner, outer = mixed_objectives(spec, job.tensors, device=job.device)
    answer = mixed_gradient(
        job.loaded.module,
        group,
        inner,
        outer,
        z=spec.z,
        returns=tuple(spec.returns),
        observer=job.observer,
        checkpoints=job.checkpoints,
        **job.calls,
    )
    return computed(answer)


def computed(answer: MixedResult) -> Computed:
    """Return what stands in the result file, however many devices computed it."""
    dfdz = {} if answer.dfdz is None else {"dfdz": answer.dfdz}
    return Computed(
        tensors=section("grads", answer.grads) | section("dfdz", dfdz),
        facts={
            "loss": answer.value,
            "shards_retained": 0,
            "shards_replayed": answer.tangents,
            "replay_difference": answer.replay_difference,
            "fallbacks": answer.fallbacks,
            "names": tuple(answer.grads),
            "unreached": list(answer.unreached),
        },
        seconds=answer.seconds,
    )
