"""What only a `Forward` has to fulfil: nothing."""

from __future__ import annotations

from gradbox.protocol import ForwardSpec, ModelView
from gradbox_service.admission.references import References
from gradbox_service.admission.tensors import Tensors


def references(spec: ForwardSpec) -> References:
    """Give no reference beyond the shared ones."""
    return ()


def check(spec: ForwardSpec, *, model: ModelView, tensors: Tensors) -> None:
    """Check nothing beyond what all computations have to fulfil."""
