"""What a user asks a box to compute, and how it becomes a job spec.

A computation is data: making one checks its inputs and nothing else. `prepare` traces its
functions, cuts its tensors into blobs and names both in a spec. Nothing here talks to a box.

Read `computation` first, which all share, then `gradient`. `forward`, `per_sample` and
`mixed_gradient` are the others; `penalty` and `loss_kinds` are what they are given besides
functions; `function_inputs` and `traced_function` read and trace what a function needs.
"""

from gradbox.computations.computation import Computation, Submission
from gradbox.computations.forward import Forward
from gradbox.computations.gradient import Gradient
from gradbox.computations.loss_kinds import Builtin, Cotangents
from gradbox.computations.mixed_gradient import MixedGradient
from gradbox.computations.penalty import Penalty
from gradbox.computations.per_sample import Jacobian, PerSampleGradient

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
    "Submission",
]
