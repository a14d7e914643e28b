"""What client, service and worker say to each other. Pydantic only: nothing here knows torch.

Read `spec` first: a job as it is posted. `options` are those of all jobs, `spec_fields` what specs
name tensors and functions by, `per_sample` the two specs that have a row for every sample, `views`
what the service answers about jobs, models and losses, `box` about the whole box, `problem` how
errors travel, `receipt` what a result file says of its own making. `runs` makes a run and tells of
it, with `optimizers`. docs/wire.md states the same in prose.
"""

from gradbox.protocol.box import BoxJob as BoxJob
from gradbox.protocol.box import BoxModel as BoxModel
from gradbox.protocol.box import BoxView as BoxView
from gradbox.protocol.box import CallerView as CallerView
from gradbox.protocol.box import DeviceMemory as DeviceMemory
from gradbox.protocol.box import DeviceView as DeviceView
from gradbox.protocol.box import ModelBuild as ModelBuild
from gradbox.protocol.box import OperationMode as OperationMode
from gradbox.protocol.box import OperationOrder as OperationOrder
from gradbox.protocol.box import OperationView as OperationView
from gradbox.protocol.box import OwnerUsage as OwnerUsage
from gradbox.protocol.box import Period as Period
from gradbox.protocol.box import UsageView as UsageView
from gradbox.protocol.optimizers import OptimizerGroup as OptimizerGroup
from gradbox.protocol.optimizers import OptimizerSpec as OptimizerSpec
from gradbox.protocol.optimizers import check_optimizer as check_optimizer
from gradbox.protocol.options import GradientOptions as GradientOptions
from gradbox.protocol.options import JobOptions as JobOptions
from gradbox.protocol.options import ModelKeywords as ModelKeywords
from gradbox.protocol.options import RunOptions as RunOptions
from gradbox.protocol.options import option_names as option_names
from gradbox.protocol.options import options_of as options_of
from gradbox.protocol.per_sample import JacobianSpec as JacobianSpec
from gradbox.protocol.per_sample import PerSampleGradientSpec as PerSampleGradientSpec
from gradbox.protocol.per_sample import SampleSpec as SampleSpec
from gradbox.protocol.problem import Problem as Problem
from gradbox.protocol.receipt import RangeView as RangeView
from gradbox.protocol.receipt import Receipt as Receipt
from gradbox.protocol.receipt import Seconds as Seconds
from gradbox.protocol.runs import History as History
from gradbox.protocol.runs import LoRASpec as LoRASpec
from gradbox.protocol.runs import RunList as RunList
from gradbox.protocol.runs import RunSpec as RunSpec
from gradbox.protocol.runs import RunView as RunView
from gradbox.protocol.runs import SaveOrder as SaveOrder
from gradbox.protocol.runs import SaveView as SaveView
from gradbox.protocol.runs import StepView as StepView
from gradbox.protocol.runs import step_seed as step_seed
from gradbox.protocol.spec import JOB_SPEC as JOB_SPEC
from gradbox.protocol.spec import CotangentGradientSpec as CotangentGradientSpec
from gradbox.protocol.spec import CotangentStepSpec as CotangentStepSpec
from gradbox.protocol.spec import ForwardSpec as ForwardSpec
from gradbox.protocol.spec import GradientSpec as GradientSpec
from gradbox.protocol.spec import JobSpec as JobSpec
from gradbox.protocol.spec import MixedGradientSpec as MixedGradientSpec
from gradbox.protocol.spec import PostedSpec as PostedSpec
from gradbox.protocol.spec import SetLossSpec as SetLossSpec
from gradbox.protocol.spec import StateSpec as StateSpec
from gradbox.protocol.spec import StepSpec as StepSpec
from gradbox.protocol.spec import names_in as names_in
from gradbox.protocol.spec import parse_as as parse_as
from gradbox.protocol.spec import parse_posted as parse_posted
from gradbox.protocol.spec import parse_spec as parse_spec
from gradbox.protocol.spec import posted_document as posted_document
from gradbox.protocol.spec import spec_digest as spec_digest
from gradbox.protocol.spec_fields import PROTOCOL as PROTOCOL
from gradbox.protocol.spec_fields import BuiltinLoss as BuiltinLoss
from gradbox.protocol.spec_fields import CotangentsLoss as CotangentsLoss
from gradbox.protocol.spec_fields import DifferentiatedSpec as DifferentiatedSpec
from gradbox.protocol.spec_fields import Digest as Digest
from gradbox.protocol.spec_fields import GraphLoss as GraphLoss
from gradbox.protocol.spec_fields import InputGroup as InputGroup
from gradbox.protocol.spec_fields import LossSpec as LossSpec
from gradbox.protocol.spec_fields import PenaltySpec as PenaltySpec
from gradbox.protocol.spec_fields import ShardRef as ShardRef
from gradbox.protocol.spec_fields import SharedSpec as SharedSpec
from gradbox.protocol.spec_fields import StateRef as StateRef
from gradbox.protocol.spec_fields import TensorRef as TensorRef
from gradbox.protocol.spec_fields import TracedFunction as TracedFunction
from gradbox.protocol.views import JOB_AND_RESULT as JOB_AND_RESULT
from gradbox.protocol.views import BlobList as BlobList
from gradbox.protocol.views import BlobView as BlobView
from gradbox.protocol.views import ExampleInput as ExampleInput
from gradbox.protocol.views import ExampleView as ExampleView
from gradbox.protocol.views import JobList as JobList
from gradbox.protocol.views import JobState as JobState
from gradbox.protocol.views import JobView as JobView
from gradbox.protocol.views import LossList as LossList
from gradbox.protocol.views import LossOption as LossOption
from gradbox.protocol.views import LossTensor as LossTensor
from gradbox.protocol.views import LossView as LossView
from gradbox.protocol.views import MethodView as MethodView
from gradbox.protocol.views import ModelList as ModelList
from gradbox.protocol.views import ModelView as ModelView
from gradbox.protocol.views import ParameterView as ParameterView
from gradbox.protocol.views import ProgressView as ProgressView
from gradbox.protocol.views import ResultView as ResultView
from gradbox.protocol.views import joined_with_result as joined_with_result
from gradbox.protocol.views import split_result as split_result
