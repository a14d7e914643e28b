"""What client, service and worker say to each other. Pydantic only: nothing here knows torch.

Read `spec` first: a job as it is posted. `options` are those of all jobs, `spec_fields` what specs
name tensors and functions by, `per_sample` the two specs that have a row for every sample, `views`
what the service answers about jobs and models, `job_and_result` a job and its small result in one
body, `losses` about the built-in losses, `box` about the whole box, `operation` whether that hands
out jobs, `example` is a model's example job, `problem` how errors travel, `receipt` what a result
file says of its own making. docs/wire.md states the same in prose.
"""

from gradbox.protocol.box import (
    BoxChange,
    BoxJob,
    BoxModel,
    BoxView,
    CallerView,
    DeviceMemory,
    DeviceView,
    ModelBuild,
    OwnerUsage,
    Span,
    UsageView,
)
from gradbox.protocol.example import ExampleInput, ExampleView
from gradbox.protocol.job_and_result import JOB_AND_RESULT, joined, parted
from gradbox.protocol.losses import LossList, LossOption, LossTensor, LossView
from gradbox.protocol.operation import OperationMode, OperationOrder, OperationView
from gradbox.protocol.options import (
    GradientOptions,
    JobOptions,
    ModelKeywords,
    RunOptions,
    option_names,
    options_of,
)
from gradbox.protocol.per_sample import JacobianSpec, PerSampleGradientSpec, SampleSpec
from gradbox.protocol.problem import Problem
from gradbox.protocol.receipt import RangeView, Receipt, Seconds
from gradbox.protocol.spec import (
    JOB_SPEC,
    CotangentGradientSpec,
    ForwardSpec,
    GradientSpec,
    JobSpec,
    MixedGradientSpec,
    parse_posted,
    parse_spec,
    spec_digest,
)
from gradbox.protocol.spec_fields import (
    PROTOCOL,
    BuiltinLoss,
    CotangentsLoss,
    DifferentiatedSpec,
    Digest,
    GraphLoss,
    InputGroup,
    LossSpec,
    PenaltySpec,
    ShardRef,
    SharedSpec,
    TensorRef,
    TracedFunction,
)
from gradbox.protocol.views import (
    BlobList,
    BlobView,
    JobList,
    JobState,
    JobView,
    MethodView,
    ModelList,
    ModelView,
    ParameterView,
    ProgressView,
    ResultView,
)

__all__ = [
    "JOB_AND_RESULT",
    "JOB_SPEC",
    "PROTOCOL",
    "BlobList",
    "BlobView",
    "BoxChange",
    "BoxJob",
    "BoxModel",
    "BoxView",
    "BuiltinLoss",
    "CallerView",
    "CotangentGradientSpec",
    "CotangentsLoss",
    "DeviceMemory",
    "DeviceView",
    "DifferentiatedSpec",
    "Digest",
    "ExampleInput",
    "ExampleView",
    "ForwardSpec",
    "GradientOptions",
    "GradientSpec",
    "GraphLoss",
    "InputGroup",
    "JacobianSpec",
    "JobList",
    "JobOptions",
    "JobSpec",
    "JobState",
    "JobView",
    "LossList",
    "LossOption",
    "LossSpec",
    "LossTensor",
    "LossView",
    "MethodView",
    "MixedGradientSpec",
    "ModelBuild",
    "ModelKeywords",
    "ModelList",
    "ModelView",
    "OperationMode",
    "OperationOrder",
    "OperationView",
    "OwnerUsage",
    "ParameterView",
    "PenaltySpec",
    "PerSampleGradientSpec",
    "Problem",
    "ProgressView",
    "RangeView",
    "Receipt",
    "ResultView",
    "RunOptions",
    "SampleSpec",
    "Seconds",
    "ShardRef",
    "SharedSpec",
    "Span",
    "TensorRef",
    "TracedFunction",
    "UsageView",
    "joined",
    "option_names",
    "options_of",
    "parse_posted",
    "parse_spec",
    "parted",
    "spec_digest",
]
