"""Per-sample gradients and Jacobians of any model: dense, factored or reduced."""

from gradbox_engine.per_sample.api import jacobian, per_sample_gradient
from gradbox_engine.per_sample.arena import Arena, Sink
from gradbox_engine.per_sample.errors import (
    BadReduction,
    BadSampleLoss,
    CoupledSamples,
    NoBatchAxis,
    SelfCheckFailed,
)
from gradbox_engine.per_sample.planning.model import Session
from gradbox_engine.per_sample.request import SampleObserver, SampleResult

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
