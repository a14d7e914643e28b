"""What a user asks a box to compute, and how it becomes a job spec.

A computation is data: making one checks its inputs and nothing else. `prepare` traces its
functions, cuts its tensors into blobs and names both in a spec. Nothing here talks to a box.
"""

from gradbox.computations.forward import Forward
from gradbox.computations.gradient import Gradient
from gradbox.computations.loss_kinds import Builtin, Cotangents
from gradbox.computations.mixed_gradient import MixedGradient
from gradbox.computations.penalty import Penalty
from gradbox.computations.per_sample import Jacobian, PerSampleGradient
from gradbox.computations.computation import Computation, Prepared

__all__ = [
    "Builtin",
    "Computation",
    "Cotangents",
    "Forward",
    "Gradient",
    "Jacobian",
    "MixedGradient",
    "Penalty",
    "PerSampleGradient",
    "Prepared",
]
