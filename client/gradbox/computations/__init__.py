"""What a user asks a box to compute, and how it becomes a job spec.

A computation is data: making one checks its inputs and nothing else. `prepare` traces its
functions, cuts its tensors into blobs and names both in a spec. Nothing here talks to a box.

Read `computation` first, which all share, then `gradient`, with `Forward` and what losses are made
of, and `curvature`, of its second derivative. `per_sample` and `mixed_gradient` are the others;
`functions` traces what a job runs.
"""

from gradbox.computations.computation import Computation, Submission
from gradbox.computations.curvature import HessianProduct, InverseHessian
from gradbox.computations.gradient import Builtin, Cotangents, Forward, Gradient, Penalty
from gradbox.computations.mixed_gradient import MixedGradient
from gradbox.computations.per_sample import Jacobian, PerSampleGradient

__all__ = [
    "Builtin",
    "Computation",
    "Cotangents",
    "Forward",
    "Gradient",
    "HessianProduct",
    "InverseHessian",
    "Jacobian",
    "MixedGradient",
    "Penalty",
    "PerSampleGradient",
    "Submission",
]
