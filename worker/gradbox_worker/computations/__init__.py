"""The computations: for each, what the engine is told and how its answer is named."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from gradbox_worker.computations import forward, gradient, mixed_gradient, per_sample
from gradbox_worker.computations.job import Compute, Computed, Job

COMPUTATIONS: Final[Mapping[str, Compute]] = {
    "gradient": gradient.compute,
    "forward": forward.compute,
    "per_sample_gradient": per_sample.compute_gradient,
    "jacobian": per_sample.compute_jacobian,
    "mixed_gradient": mixed_gradient.compute,
}

__all__ = ["COMPUTATIONS", "Compute", "Computed", "Job"]
