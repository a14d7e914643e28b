"""`HessianProduct` and `InverseHessian`: a row for each vector."""

from __future__ import annotations

from gradbox.protocol import HessianProductSpec, InverseHessianSpec
from gradbox_engine.set_loss import ConjugateGradients, curvature
from gradbox_worker.computations.engine_inputs import gradient_loss
from gradbox_worker.computations.job import Computed, LoadedJob
from gradbox_worker.computations.sections import GRADS, section


def compute(job: LoadedJob, spec: HessianProductSpec) -> Computed:
    """Return the products of the vectors."""
    solve, facts = None, {}
    if isinstance(spec, InverseHessianSpec):
        solve = ConjugateGradients(
            damping=spec.damping, max_iterations=spec.max_iterations, tolerance=spec.tolerance
        )
        facts = {"damping": spec.damping}
    answer = curvature(
        job.loaded.module,
        job.groups,
        gradient_loss(spec, job.tensors, device=job.device).objective,
        {name: job.tensors.tensor(ref) for name, ref in spec.vectors.items()},
        kind=spec.kind,
        solve=solve,
        wrt=spec.wrt,
        retain=spec.retain,
        observer=job.observer,
        **job.calls,
    )
    return Computed(
        tensors=section(GRADS, answer.products),
        facts={
            "loss": answer.loss,
            "replay_difference": answer.replay_difference,
            "names": tuple(answer.products),
            "kind": spec.kind,
            "attention": "math",
            "iterations": answer.iterations or None,
            "residuals": answer.residuals or None,
            **facts,
        },
        seconds=answer.seconds,
    )
