"""Per-sample gradients and Jacobians of any model: dense, factored or reduced."""

from gradbox_engine.errors import (
    BadReduction,
    BadSampleLoss,
    CoupledSamples,
    NoBatchAxis,
    SelfCheckFailed,
)
from gradbox_engine.per_sample.api import jacobian, per_sample_gradient
from gradbox_engine.per_sample.pieces import Sink
from gradbox_engine.per_sample.planned_model import forget_plans
from gradbox_engine.per_sample.request import OtherShards, SampleResult

__all__ = [
    "BadReduction",
    "BadSampleLoss",
    "CoupledSamples",
    "NoBatchAxis",
    "OtherShards",
    "SampleResult",
    "SelfCheckFailed",
    "Sink",
    "forget_plans",
    "jacobian",
    "per_sample_gradient",
]
