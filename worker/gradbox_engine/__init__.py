"""The mathematics of gradbox: pure torch; no queue, no HTTP, no files."""

from gradbox_engine.at_cotangents import CotangentGradient, FirstOutputs, gradient_at_cotangents
from gradbox_engine.errors import (
    BadInputs,
    BadOutput,
    BadPenalty,
    BadWeights,
    EngineError,
    GraphInBuffer,
    LossNotFinite,
    LossNotScalar,
    ModelCallFailed,
    NoTangent,
    ReplayMismatch,
    SampleStreamRefused,
    UnknownParameter,
)
from gradbox_engine.gradient import set_gradient
from gradbox_engine.job import Group, MixedResult, Objective, Observer, Penalty, SetGradient
from gradbox_engine.kept_pass import KeptPass
from gradbox_engine.mixed import mixed_gradient
from gradbox_engine.set_outputs import SetOutputs, set_outputs
from gradbox_engine.streams import shard_stream

__all__ = [
    "BadInputs",
    "BadOutput",
    "BadPenalty",
    "BadWeights",
    "CotangentGradient",
    "EngineError",
    "FirstOutputs",
    "GraphInBuffer",
    "Group",
    "KeptPass",
    "LossNotFinite",
    "LossNotScalar",
    "MixedResult",
    "ModelCallFailed",
    "NoTangent",
    "Objective",
    "Observer",
    "Penalty",
    "ReplayMismatch",
    "SampleStreamRefused",
    "SetGradient",
    "SetOutputs",
    "UnknownParameter",
    "gradient_at_cotangents",
    "mixed_gradient",
    "set_gradient",
    "set_outputs",
    "shard_stream",
]
