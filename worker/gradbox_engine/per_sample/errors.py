"""What can be wrong with a per-sample computation.

EngineError
├── CoupledSamples     one sample's output depends on another sample
├── NoBatchAxis        the samples cannot be found in the inputs or the output
├── BadReduction       a reduction or an argument of one that does not fit
├── BadSampleLoss      the loss does not return one number a sample
└── SelfCheckFailed    the rules' result is not the gradient: a defect in gradbox
"""

from __future__ import annotations

from gradbox_engine.errors import EngineError


class CoupledSamples(EngineError):
    """One sample's output depends on another, so it has no gradient of its own."""


class NoBatchAxis(EngineError):
    """The samples cannot be found in the inputs or in the output."""


class BadReduction(EngineError, ValueError):
    """A reduction, or an argument of one, does not fit."""


class BadSampleLoss(EngineError):
    """The loss does not return one number for each sample."""


class SelfCheckFailed(EngineError):
    """The result differs from the gradient that autograd gives: a defect in gradbox."""
