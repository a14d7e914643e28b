"""What client, service and worker say to each other. Pydantic only: nothing here knows torch.

`spec` is a job as it is posted, `views` is what the service answers, `receipt` is what a result
file says of its own making. `docs/wire.md` states the same in prose.
"""

from gradbox.protocol.problem import Problem
from gradbox.protocol.receipt import Receipt, Seconds
from gradbox.protocol.spec import (
    PROTOCOL,
    BuiltinLoss,
    Digest,
    GradientSpec,
    GraphLoss,
    InputGroup,
    JobSpec,
    LossSpec,
    PenaltySpec,
    ShardRef,
    TensorRef,
    TracedFunction,
    parse_spec,
    spec_digest,
)
from gradbox.protocol.views import (
    JobState,
    JobView,
    MethodView,
    ModelView,
    ParameterView,
    ProgressView,
    ResultView,
)

__all__ = [
    "PROTOCOL",
    "BuiltinLoss",
    "Digest",
    "GradientSpec",
    "GraphLoss",
    "InputGroup",
    "JobSpec",
    "JobState",
    "JobView",
    "LossSpec",
    "MethodView",
    "ModelView",
    "ParameterView",
    "PenaltySpec",
    "Problem",
    "ProgressView",
    "Receipt",
    "ResultView",
    "Seconds",
    "ShardRef",
    "TensorRef",
    "TracedFunction",
    "parse_spec",
    "spec_digest",
]
