"""A job in two phases over ranges of its shards, on one device or on several.

    Z = cat(Z₁ … Z_k),   dL/dθ = Σᵣ Σ_{i in r} z̄ᵢᵀ ∂f(xᵢ; θ)/∂θ

`protocol` says what passes between a job and its devices, `split_job` runs the phases, `held_job`
is a device's side, and `one_device` joins the two without copying anything: so a job on one device
runs as one over many does. What is computed is above: set_loss/ and mixed/.

What only several devices need: `cut` cuts shards into ranges, `coroutines` calls devices from one
thread, `joining` makes Z of the ranges' parts, `reduction` one sum of theirs. State that shards
change is in `norm_statistics` and `independence`, a device that dies in `split_job`.

samples/ has per-sample gradients and Jacobians, whose ranges need no phases.
"""

from gradbox_engine.ranges.cut import cut
from gradbox_engine.ranges.held_job import GraphsBetweenJobs, HeldJob
from gradbox_engine.ranges.one_device import OneDevice, one_range
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
    "Sums",
    "added",
    "cut",
    "one_range",
]
