"""The mathematics of gradbox: pure torch; no queue, no HTTP, no files."""

from gradbox_engine.checkpoint import Checkpoint, Checkpoints
from gradbox_engine.errors import (
    BadInputs,
    BadOutput,
    BadPenalty,
    BadWeights,
    CoupledShards,
    DeviceLost,
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
from gradbox_engine.mixed import mixed_gradient
from gradbox_engine.model.calling.blame import is_out_of_memory
from gradbox_engine.model.calling.shard_rng import shard_stream
from gradbox_engine.replay.kept_graphs import KeptPass
from gradbox_engine.requests import (
    CallKeywords,
    CallOptions,
    CotangentGradient,
    Group,
    MixedResult,
    Objective,
    Observer,
    Penalty,
    SetGradient,
)
from gradbox_engine.set_loss import (
    FirstOutputs,
    SetOutputs,
    gradient_at_cotangents,
    set_gradient,
    set_outputs,
)

__all__ = [
    "BadInputs",
    "BadOutput",
    "BadPenalty",
    "BadWeights",
    "CallKeywords",
    "CallOptions",
    "Checkpoint",
    "Checkpoints",
    "CotangentGradient",
    "CoupledShards",
    "DeviceLost",
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
    "is_out_of_memory",
    "mixed_gradient",
    "set_gradient",
    "set_outputs",
    "shard_stream",
]
