"""The mathematics of gradbox: pure torch; no queue, no HTTP, no files."""

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
from gradbox_engine.streams import shard_stream

__all__ = [
    "BadInputs",
    "BadOutput",
    "BadPenalty",
    "BadWeights",
    "EngineError",
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
    "UnknownParameter",
    "set_gradient",
    "shard_stream",
]
