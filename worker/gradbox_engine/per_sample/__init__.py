"""Per-sample gradients and Jacobians of any model: dense, factored or reduced."""

from gradbox_engine.per_sample.arena import Arena, Sink
from gradbox_engine.per_sample.computation import jacobian, per_sample_gradient
from gradbox_engine.per_sample.failures import (
    BadReduction,
    BadSampleLoss,
    CoupledSamples,
    NoBatchAxis,
    SelfCheckFailed,
)
from gradbox_engine.per_sample.request import SampleObserver, SampleResult
from gradbox_engine.per_sample.session import Session

__all__ = [
    "Arena",
    "BadReduction",
    "BadSampleLoss",
    "CoupledSamples",
    "NoBatchAxis",
    "SampleObserver",
    "SampleResult",
    "SelfCheckFailed",
    "Session",
    "Sink",
    "jacobian",
    "per_sample_gradient",
]
