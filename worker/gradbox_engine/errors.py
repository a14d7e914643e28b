"""Every error the engine raises.

    EngineError
    ├── BadInputs (ValueError)          groups, shards or argument names that cannot be called
    ├── UnknownParameter (ValueError)   a `wrt` pattern that matches nothing
    ├── BadWeights (ValueError)         an overlay that does not fit the model
    ├── BadOutput (TypeError)           no floating-point tensor came out where z was looked for
    ├── BadPenalty (ValueError)         a penalty on something that is not there
    ├── ModelCallFailed                 the model, the readout or the loss raised; see __cause__
    ├── GraphInBuffer                   the model stores a graph in a buffer across shards
    ├── SampleStreamRefused             `streams="sample"` on an operation that it cannot key
    ├── LossNotScalar (TypeError)       the loss is not one real number
    ├── LossNotFinite                   the loss is NaN or infinite
    └── ReplayMismatch                  a replay did not reproduce the first pass

Running out of memory stays `torch.OutOfMemoryError`.
"""

from __future__ import annotations


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


class BadPenalty(EngineError, ValueError):
    """A penalty names a submodule that is not there, or returns something that is not a scalar."""


class ModelCallFailed(EngineError):
    """The model, the readout or the loss raised an error, which is this one's `__cause__`."""


class GraphInBuffer(EngineError):
    """After a shard a buffer requires grad: the shards are not separable."""


class SampleStreamRefused(EngineError):
    """A random operation cannot be keyed by sample."""


class LossNotScalar(EngineError, TypeError):
    """The loss did not return one real floating-point number."""


class LossNotFinite(EngineError):
    """The loss is NaN or infinite, so it has no gradient."""


class ReplayMismatch(EngineError):
    """A replayed shard differs from its first pass by more than rounding."""
