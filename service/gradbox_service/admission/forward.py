"""What only a `Forward` has to fulfil: the names in `wrt`."""

from __future__ import annotations

from gradbox.protocol import ForwardSpec, ModelView
from gradbox_service.admission.parameters import check_wrt
from gradbox_service.admission.references import References
from gradbox_service.admission.tensors import TensorHeaders


def references(spec: ForwardSpec) -> References:
    """Give no reference beyond the shared ones."""
    return ()


def check(spec: ForwardSpec, *, model: ModelView, tensors: TensorHeaders) -> None:
    """Check what its gradient jobs will differentiate.

    Raises:
        InvalidInputs: a glob of `wrt` matches nothing.
    """
    check_wrt(spec, model=model, tensors=tensors)
