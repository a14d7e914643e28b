"""Exact gradients of large pretrained PyTorch models, computed on a GPU box that a team shares.

    from gradbox import GradClient, Gradient

    job = GradClient().submit(Gradient(model="minilm", inputs=shards, loss=info_nce))
    job.result().apply_to(local_model)

Importing this package loads neither torch nor anything that reads a network or a file.

Of its modules read `client` first, then `submitting` and `job`, `runs` for training and `stores`
for rows that stay, over `box_client`; `local` is a client without a box, `estimate` says beforehand
what a job would take, `async_client` and `batch` are for many at a time, `errors` for whatever goes
wrong, `losses` names the built-in ones. `settings` finds the box, `written_files` reads what a
person wrote; `progress`, `html` and `printable` are what is shown, `spans` what is traced.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gradbox import losses as losses
    from gradbox.async_client import AsyncGradClient as AsyncGradClient
    from gradbox.async_client import AsyncJob as AsyncJob
    from gradbox.batch import Batch as Batch
    from gradbox.client import GradClient as GradClient
    from gradbox.computations import Builtin as Builtin
    from gradbox.computations import Cotangents as Cotangents
    from gradbox.computations import Forward as Forward
    from gradbox.computations import Gradient as Gradient
    from gradbox.computations import HessianProduct as HessianProduct
    from gradbox.computations import InverseHessian as InverseHessian
    from gradbox.computations import Jacobian as Jacobian
    from gradbox.computations import MixedGradient as MixedGradient
    from gradbox.computations import Penalty as Penalty
    from gradbox.computations import PerSampleGradient as PerSampleGradient
    from gradbox.estimate import Estimate as Estimate
    from gradbox.http.connection import Retry as Retry
    from gradbox.http.events import JobEvent as JobEvent
    from gradbox.inputs.packing import Packed as Packed
    from gradbox.inputs.packing import pack as pack
    from gradbox.job import Job as Job
    from gradbox.protocol import JobState as JobState
    from gradbox.protocol import step_seed as step_seed
    from gradbox.results.result import GradResult as GradResult
    from gradbox.runs import LoRA as LoRA
    from gradbox.runs import Optimizer as Optimizer
    from gradbox.runs import RunState as RunState
    from gradbox.runs import TrainRun as TrainRun
    from gradbox.runs import TrainStep as TrainStep
    from gradbox.stores import CountSketch as CountSketch
    from gradbox.stores import GradStore as GradStore
    from gradbox.stores import PerLayer as PerLayer
    from gradbox.stores import Rademacher as Rademacher

from gradbox.errors import BlobInUse as BlobInUse
from gradbox.errors import BlobRejected as BlobRejected
from gradbox.errors import BlobTooLarge as BlobTooLarge
from gradbox.errors import BoxDraining as BoxDraining
from gradbox.errors import GradboxError as GradboxError
from gradbox.errors import GradientNotFinite as GradientNotFinite
from gradbox.errors import GraphRefused as GraphRefused
from gradbox.errors import IdempotencyConflict as IdempotencyConflict
from gradbox.errors import InvalidInputs as InvalidInputs
from gradbox.errors import InvalidJob as InvalidJob
from gradbox.errors import InvalidRequest as InvalidRequest
from gradbox.errors import JobCancelled as JobCancelled
from gradbox.errors import JobFailed as JobFailed
from gradbox.errors import JobNotFound as JobNotFound
from gradbox.errors import JobTimedOut as JobTimedOut
from gradbox.errors import LossNotFinite as LossNotFinite
from gradbox.errors import LossNotScalar as LossNotScalar
from gradbox.errors import MissingBlobs as MissingBlobs
from gradbox.errors import ModelCallFailed as ModelCallFailed
from gradbox.errors import NeedsBox as NeedsBox
from gradbox.errors import NotPositiveDefinite as NotPositiveDefinite
from gradbox.errors import OutOfMemory as OutOfMemory
from gradbox.errors import OwnerOnly as OwnerOnly
from gradbox.errors import ProtocolError as ProtocolError
from gradbox.errors import QueueFull as QueueFull
from gradbox.errors import ReplayMismatch as ReplayMismatch
from gradbox.errors import ResultGone as ResultGone
from gradbox.errors import ResultNotReady as ResultNotReady
from gradbox.errors import RunConflict as RunConflict
from gradbox.errors import RunNotFound as RunNotFound
from gradbox.errors import ServiceUnavailable as ServiceUnavailable
from gradbox.errors import StorageFull as StorageFull
from gradbox.errors import StoreConflict as StoreConflict
from gradbox.errors import StoreNotFound as StoreNotFound
from gradbox.errors import TooManyRequests as TooManyRequests
from gradbox.errors import Unauthorized as Unauthorized
from gradbox.errors import UnknownModel as UnknownModel
from gradbox.errors import UntraceableLoss as UntraceableLoss
from gradbox.errors import UnusableModel as UnusableModel
from gradbox.errors import WorkerLost as WorkerLost

# Loaded when they are first used: name → module.
_LAZY = {
    "AsyncGradClient": "gradbox.async_client",
    "AsyncJob": "gradbox.async_client",
    "Batch": "gradbox.batch",
    "Builtin": "gradbox.computations",
    "Cotangents": "gradbox.computations",
    "Estimate": "gradbox.estimate",
    "Forward": "gradbox.computations",
    "GradClient": "gradbox.client",
    "GradResult": "gradbox.results.result",
    "Gradient": "gradbox.computations",
    "HessianProduct": "gradbox.computations",
    "InverseHessian": "gradbox.computations",
    "Jacobian": "gradbox.computations",
    "Job": "gradbox.job",
    "JobEvent": "gradbox.http.events",
    "JobState": "gradbox.protocol",
    "LoRA": "gradbox.runs",
    "MixedGradient": "gradbox.computations",
    "Optimizer": "gradbox.runs",
    "Packed": "gradbox.inputs.packing",
    "Penalty": "gradbox.computations",
    "PerSampleGradient": "gradbox.computations",
    "Retry": "gradbox.http.connection",
    "RunState": "gradbox.runs",
    "TrainRun": "gradbox.runs",
    "TrainStep": "gradbox.runs",
    "CountSketch": "gradbox.stores",
    "GradStore": "gradbox.stores",
    "PerLayer": "gradbox.stores",
    "Rademacher": "gradbox.stores",
    "pack": "gradbox.inputs.packing",
    "step_seed": "gradbox.protocol",
}

_ERRORS = [
    name
    for name, value in globals().items()
    if isinstance(value, type) and issubclass(value, GradboxError)
]
__all__ = sorted(["losses", *_ERRORS, *_LAZY])


def __getattr__(name: str) -> Any:
    if name == "losses":
        return import_module("gradbox.losses")
    if name in _LAZY:
        found = globals()[name] = getattr(import_module(_LAZY[name]), name)
        return found
    raise AttributeError(f"module 'gradbox' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
