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
    ReplayMismatch,
    SampleStreamRefused,
    UnknownParameter,
)
from gradbox_engine.gradient import set_gradient
from gradbox_engine.job import Group, Objective, Observer, Penalty, SetGradient
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
    "LossNotFinite",
    "LossNotScalar",
    "ModelCallFailed",
    "Objective",
    "Observer",
    "Penalty",
    "ReplayMismatch",
    "SampleStreamRefused",
    "SetGradient",
    "SetOutputs",
    "UnknownParameter",
    "gradient_at_cotangents",
    "set_gradient",
    "set_outputs",
    "shard_stream",
]
