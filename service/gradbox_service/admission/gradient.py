"""What a loss over all shards has to fulfil, of a `Gradient`, a step, or a curvature's product."""

from __future__ import annotations

from gradbox.errors import InvalidInputs
from gradbox.protocol import (
    GradientSpec,
    GraphLoss,
    HessianProductSpec,
    ModelView,
    SetLossSpec,
    StepSpec,
    TensorRef,
)
from gradbox_service.admission.functions import check_loss, check_penalties
from gradbox_service.admission.parameters import (
    check_dtypes_of_gradients,
    check_input_gradients,
    check_names,
    check_shapes,
    check_wrt,
)
from gradbox_service.admission.tensors import TensorHeaders


def check(spec: GradientSpec | StepSpec, *, model: ModelView, tensors: TensorHeaders) -> None:
    """Check the job.

    Raises:
        GraphRefused: the loss or a penalty is not an allowed graph.
        InvalidInputs: names do not fit the model, the blobs or each other.
    """
    _check_loss(spec)
    check_penalties(spec)
    check_wrt(spec, model=model, tensors=tensors, others=_loss_parameters(spec))
    if "grads" in spec.returns:
        check_dtypes_of_gradients(spec, model=model)
    if "input_grads" in spec.returns:
        check_input_gradients(spec, tensors=tensors)


def check_products(spec: HessianProductSpec, *, model: ModelView, tensors: TensorHeaders) -> None:
    """Check a product with a curvature, or with its inverse.

    Raises:
        GraphRefused: the loss is not an allowed graph.
        InvalidInputs: names or shapes do not fit the model, or each other.
    """
    _check_loss(spec)
    check_names(spec.wrt, model=model)
    shapes = {view.name: view.shape for view in model.parameters}
    lacks = f"vectors: model {model.name!r} has no parameter"
    check_shapes("vectors", spec.vectors, shapes, tensors=tensors, lacks=lacks, rows=True)


def _check_loss(spec: SetLossSpec) -> None:
    both = sorted({group.name for group in spec.inputs} & set(spec.loss_inputs))
    if both and len(spec.inputs) > 1:  # one group alone is the first argument, whatever its name
        raise InvalidInputs(
            f"loss_inputs: {both} are names of input groups too; the loss could not tell them "
            "apart: rename one of the two"
        )
    check_loss(spec)


def _loss_parameters(spec: SetLossSpec) -> list[str]:
    """Return the names under which gradients of the loss's own tensors come back."""
    names = [
        f"loss_inputs.{name}"
        for name, value in spec.loss_inputs.items()
        if isinstance(value, TensorRef) and value.requires_grad
    ]
    if isinstance(spec.loss, GraphLoss):
        tensors = spec.loss.function.tensors
        names += [f"loss.{name}" for name, reference in tensors.items() if reference.requires_grad]
    return names
