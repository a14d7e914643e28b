"""One job over several devices: each runs a contiguous range of the shards.

    Z = cat(Z₁ … Z_k),   dL/dθ = Σᵣ Σ_{i in r} z̄ᵢᵀ ∂f(xᵢ; θ)/∂θ

Read `split_set_gradient` first, the coordinator's side on one page, with `protocol`, what passes
between it and the devices. Then `held_job`, a device's side; replay/ does the work in both. State
that shards change is in `norm_statistics` and `independence`, a device that dies in `split_job`.
`in_process` runs ranges one after the other on one device, and so says what others must return.

Below these: `cut` cuts shards into ranges, `coroutines` calls several devices from one thread;
`range_on_device` is what a device keeps between two calls, `joining` makes Z of the ranges' parts,
`reduction` one sum of theirs.

`split_halves` has the job whose loss runs elsewhere, `graphs_between_jobs` what waits between its
halves; mixed/ mixed second derivatives, by the same
protocol; samples/ per-sample gradients and Jacobians, whose ranges need no phases.
"""

from gradbox_engine.ranges.cut import cut
from gradbox_engine.ranges.graphs_between_jobs import GraphsBetweenJobs
from gradbox_engine.ranges.held_job import HeldJob, held_job
from gradbox_engine.ranges.in_process import OneDevice, set_gradient_in_ranges
from gradbox_engine.ranges.protocol import (
    Devices,
    EarlierOutputs,
    GradientForm,
    NamedSums,
    NormStatistics,
    NormUpdate,
    Range,
    RangeCotangents,
    RangeDevice,
    RangeGradient,
    RangeOutputs,
    Sums,
)
from gradbox_engine.ranges.reduction import added
from gradbox_engine.ranges.split_halves import (
    SplitCotangentGradient,
    SplitOutputs,
    split_gradient_at_cotangents,
    split_set_outputs,
)
from gradbox_engine.ranges.split_job import RangeRun
from gradbox_engine.ranges.split_set_gradient import SplitGradient, split_set_gradient

__all__ = [
    "Devices",
    "EarlierOutputs",
    "GradientForm",
    "GraphsBetweenJobs",
    "HeldJob",
    "NamedSums",
    "NormStatistics",
    "NormUpdate",
    "OneDevice",
    "Range",
    "RangeCotangents",
    "RangeDevice",
    "RangeGradient",
    "RangeOutputs",
    "RangeRun",
    "SplitCotangentGradient",
    "SplitGradient",
    "SplitOutputs",
    "Sums",
    "added",
    "cut",
    "held_job",
    "set_gradient_in_ranges",
    "split_gradient_at_cotangents",
    "split_set_gradient",
    "split_set_outputs",
]
