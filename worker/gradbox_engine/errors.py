"""Every error the engine raises.

    EngineError
    ├── BadInputs (ValueError)          groups, shards or argument names that cannot be called
    ├── UnknownParameter (ValueError)   a `wrt` pattern that matches nothing
    ├── BadWeights (ValueError)         an overlay that does not fit the model
    ├── BadOutput (TypeError)           no floating-point tensor came out where z was looked for
    ├── BadOptimizer (ValueError)       an optimizer, or an option of one, that torch does not have
    ├── BadPenalty (ValueError)         a penalty on something that is not there
    ├── ModelCallFailed                 the model, the readout or the loss raised; see __cause__
    ├── GraphInBuffer                   the model stores a graph in a buffer across shards
    ├── SampleStreamRefused             `streams="sample"` on an operation that it cannot key
    ├── NoTangent                       an operation has no derivative of the kind that is needed
    ├── LossNotScalar (TypeError)       the loss is not one real number
    ├── LossNotFinite                   the loss is NaN or infinite
    ├── GradientNotFinite               a gradient that a parameter was to be updated by is
    ├── NotPositiveDefinite             a curvature to be inverted bends down along some direction
    ├── ReplayMismatch                  a replay did not reproduce the first pass
    ├── CoupledShards                   a job over several ranges needs a buffer from shard to shard
    ├── DeviceLost                      a device that ran a range of shards is gone
    │                                   of per-sample computations:
    ├── CoupledSamples                  one sample's output depends on another sample
    ├── NoBatchAxis                     the samples cannot be found in the inputs or the output
    ├── BadReduction (ValueError)       a reduction or an argument of one that does not fit
    ├── BadSampleLoss                   the loss does not return one number a sample
    └── SelfCheckFailed                 the rules' rows are not autograd's: a defect in gradbox

Running out of memory is `torch.OutOfMemoryError` on every device.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


class EngineError(Exception):
    """The engine did not compute what it was asked for; the message says what to do about it."""


class BadInputs(EngineError, ValueError):
    """Groups, shards or argument names are not what a model can be called with."""


class UnknownParameter(EngineError, ValueError):
    """A `wrt` pattern matches no floating-point parameter."""


class BadWeights(EngineError, ValueError):
    """An overlay names, shapes or types a tensor that the model does not have like that."""


class BadOutput(EngineError, TypeError):
    """What the model returned does not hold a floating-point tensor where z was looked for."""


class BadOptimizer(EngineError, ValueError):
    """Torch has no such optimizer, or it refuses an option or a parameter."""


class BadPenalty(EngineError, ValueError):
    """A penalty names a submodule that is not there, or returns something that is not a scalar."""


@dataclass(frozen=True)
class FailedCall:
    """What was called: a model where it was one, the submodule that raised, and the arguments."""

    model: Any
    module: Any
    arguments: Mapping[str, Any]


class ModelCallFailed(EngineError):
    """The model, the readout or the loss raised an error, which is this one's `__cause__`.

    In another process there is the message alone: `call` holds tensors.
    """

    def __init__(self, message: str, *, call: FailedCall | None = None) -> None:
        super().__init__(message)
        self.call = call

    def __reduce__(self) -> tuple[type[ModelCallFailed], tuple[str]]:
        return type(self), (str(self),)


class GraphInBuffer(EngineError):
    """Through a buffer a gradient would pass between shards: they are not separable."""


class SampleStreamRefused(EngineError):
    """A random operation cannot be keyed by sample."""


class NoTangent(EngineError):
    """An operation of the model has neither a forward-mode rule nor a second derivative."""


class LossNotScalar(EngineError, TypeError):
    """The loss did not return one real floating-point number."""


class LossNotFinite(EngineError):
    """The loss is NaN or infinite, so it has no gradient."""


class GradientNotFinite(EngineError):
    """A gradient is NaN or infinite, so no parameter is updated by it."""


class NotPositiveDefinite(EngineError):
    """Conjugate gradients met a direction along which the curvature is not positive."""


class ReplayMismatch(EngineError):
    """A replayed shard differs from its first pass by more than rounding."""


class CoupledShards(EngineError):
    """A shard may depend on the shards before it, by a buffer: they cannot run side by side.

    The job runs on one device.
    """

    def __init__(self, message: str, *, name: str = "") -> None:
        super().__init__(message)
        self.name = name  # the buffer's or attribute's full name; empty where it is neither


class DeviceLost(EngineError):
    """A device is gone, with the graphs and sums that it held; raised by who reaches devices."""


class CoupledSamples(EngineError):
    """One sample's output depends on another, so it has no gradient of its own."""


class NoBatchAxis(EngineError):
    """The samples cannot be found in the inputs or in the output."""


class BadReduction(EngineError, ValueError):
    """A reduction, or an argument of one, does not fit."""


class BadSampleLoss(EngineError):
    """The loss does not return one number for each sample."""


class SelfCheckFailed(EngineError):
    """The rows differ from the gradient that autograd gives: a defect in gradbox."""
