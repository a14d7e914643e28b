"""`MixedGradient`: dt/dy, and dfdz if it was asked for."""

from __future__ import annotations

from gradbox.protocol import MixedGradientSpec
from gradbox_engine.mixed import leaves_of, split_mixed_gradient
from gradbox_engine.requests import MixedResult
from gradbox_worker.computations.engine_inputs import mixed_objectives
from gradbox_worker.computations.held_jobs import held_mixed_gradient
from gradbox_worker.computations.job import Computed, LoadedJob
from gradbox_worker.computations.sections import section


def compute(job: LoadedJob, spec: MixedGradientSpec) -> Computed:
    """Return dt/dy."""
    (group,) = job.groups
    inner, outer = mixed_objectives(spec, job.tensors, device=job.device)
    parts = job.parts()
    with held_mixed_gradient(job, spec, inner, leaves_of(inner, outer)) as held:
        answer = split_mixed_gradient(
            job.leading.devices(held),
            parts,
            group,
            job.resized(outer),
            returns=tuple(spec.returns),
            device=held.device,
            observer=job.observer,
            **job.calls,
        )
    return _computed(answer)


def _computed(answer: MixedResult) -> Computed:
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
        recomputed=answer.recomputed,
        runs=answer.ranges,
    )
