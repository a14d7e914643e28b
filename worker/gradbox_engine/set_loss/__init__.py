"""L = g(Z) over all shards, with one shard's graph in memory: whole, or in two halves.

Read `set_gradient`, the job on one page, then `held_passes`, what a device does with a shard. The
phases between them are those of `gradbox_engine.ranges`, also where there is one device. `halves`
are jobs that end between the phases, or begin there. `curvature` is of second derivatives, whose
inverse is multiplied with by `conjugate_gradients`.
"""

from gradbox_engine.set_loss.conjugate_gradients import ConjugateGradients
from gradbox_engine.set_loss.curvature import curvature
from gradbox_engine.set_loss.halves import (
    FirstOutputs,
    SetOutputs,
    gradient_at_cotangents,
    set_outputs,
    split_gradient_at_cotangents,
    split_set_outputs,
)
from gradbox_engine.set_loss.held_passes import held_job
from gradbox_engine.set_loss.set_gradient import set_gradient, split_set_gradient

__all__ = [
    "ConjugateGradients",
    "FirstOutputs",
    "SetOutputs",
    "curvature",
    "gradient_at_cotangents",
    "held_job",
    "set_gradient",
    "set_outputs",
    "split_gradient_at_cotangents",
    "split_set_gradient",
    "split_set_outputs",
]
