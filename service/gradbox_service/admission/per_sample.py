"""What only a `PerSampleGradient` or a `Jacobian` has to fulfil."""

from __future__ import annotations

from gradbox.errors import InvalidInputs
from gradbox.graphs.check import check_graph
from gradbox.protocol import (
    JacobianSpec,
    ModelView,
    PerSampleGradientSpec,
    StoreFitSpec,
    TensorRef,
)
from gradbox_service.admission.parameters import check_names, check_shapes
from gradbox_service.admission.tensors import TensorHeaders, references


def check_gradient(
    spec: PerSampleGradientSpec, *, model: ModelView, tensors: TensorHeaders
) -> None:
    """Check the job.

    Raises:
        GraphRefused: the loss is not an allowed graph.
        InvalidInputs: names do not fit the model, or something of the loss requires grad.
    """
    function = spec.loss.function
    check_graph(function.graph, function.tensors, positional=1, arguments=[*spec.loss_inputs])
    trainable = [f"loss.{name}" for name, ref in function.tensors.items() if ref.requires_grad]
    trainable += [
        f"loss_inputs.{name}"
        for name, value in (*spec.loss_inputs.items(), *spec.against_loss_inputs.items())
        if isinstance(value, TensorRef) and value.requires_grad
    ]
    if trainable:
        raise InvalidInputs(
            f"{', '.join(trainable)}: expected no tensor of the loss to require grad, since "
            f"per-sample gradients are those of the model's parameters; detach it"
        )
    check_names(spec.wrt, model=model)


def check_fit(spec: StoreFitSpec, *, model: ModelView, tensors: TensorHeaders) -> None:
    """Check the job as `check_gradient` does, if it is of samples."""
    if spec.loss is not None:
        check_gradient(spec, model=model, tensors=tensors)


def check_jacobian(spec: JacobianSpec, *, model: ModelView, tensors: TensorHeaders) -> None:
    """Check the job.

    Raises:
        InvalidInputs: names or shapes do not fit the model, or vectors are complex.
    """
    check_names(spec.wrt, model=model)
    for where, reference in references(spec.vectors, "vectors"):
        dtype = tensors.entry(reference, where=where).dtype
        if dtype.startswith("C"):
            raise InvalidInputs(f"{where}: expected real numbers, got {dtype}")
    shapes = {view.name: view.shape for view in model.parameters}
    named = spec.vectors if isinstance(spec.vectors, dict) else {}
    lacks = f"vectors: model {model.name!r} has no parameter"
    check_shapes("vectors", named, shapes, tensors=tensors, lacks=lacks)
