"""Do the names in `wrt` and `weights` belong to the model?"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from fnmatch import fnmatchcase

from gradbox.errors import InvalidInputs
from gradbox.protocol import DifferentiatedSpec, ModelView, SharedSpec, TensorRef
from gradbox_service.admission.tensors import TensorHeaders

FLOATING = frozenset({"F64", "F32", "F16", "BF16"})


def check_weights(spec: SharedSpec, *, model: ModelView, tensors: TensorHeaders) -> None:
    """Check the tensors that are laid over the model's own.

    Raises:
        InvalidInputs: the model has no parameter or buffer of that name, or of another shape.
    """
    shapes = {view.name: view.shape for view in (*model.parameters, *model.buffers)}
    shapes |= {name: shapes[first] for name, first in model.tied.items()}
    for name, reference in spec.weights.items():
        if name not in shapes:
            raise InvalidInputs(
                f"weights: model {model.name!r} has no parameter or buffer {name!r}"
                f"{suggestion(name, list(shapes))}"
            )
        entry = tensors.entry(reference, where=f"weights.{name}")
        if list(entry.shape) != shapes[name]:
            raise InvalidInputs(
                f"weights.{name}: expected the shape {shapes[name]}, got {list(entry.shape)}"
            )


def check_wrt(
    spec: DifferentiatedSpec,
    *,
    model: ModelView,
    tensors: TensorHeaders,
    others: Sequence[str] = (),
) -> None:
    """Check that every glob names something that has a gradient.

    Args:
        others: names that have one beside parameters and inputs.

    Raises:
        InvalidInputs: one matches nothing.
    """
    if spec.wrt is None:
        return
    parameters = model.parameter_names() + list(others)
    inputs = _differentiable_inputs(spec, tensors)
    for glob in spec.wrt:
        if not matches_parameter(glob, parameters) and not any(
            fnmatchcase(name, glob) for name in inputs
        ):
            raise InvalidInputs(
                f"wrt: {glob!r} matches no parameter or module of model {model.name!r}, no "
                f"parameter of the loss, and no floating-point input"
                f"{near_misses(glob, parameters, inputs)}"
            )


def check_input_gradients(spec: SharedSpec, *, tensors: TensorHeaders) -> None:
    """Check that there are inputs to differentiate by.

    Raises:
        InvalidInputs: no argument of the model is floating-point.
    """
    if not _differentiable_inputs(spec, tensors):
        raise InvalidInputs(
            "returns: expected a floating-point argument of the model for 'input_grads', got whole "
            "numbers and truth values alone, which have no gradient; leave 'input_grads' out"
        )


def matches_parameter(glob: str, parameters: Sequence[str]) -> bool:
    """Whether a glob matches a parameter's name, or that of a module that holds one."""
    return any(fnmatchcase(name, glob) or fnmatchcase(name, f"{glob}.*") for name in parameters)


def near_misses(glob: str, parameters: Sequence[str], others: Sequence[str] = ()) -> str:
    """Return a clause that names the parameters and modules that a glob may have meant."""
    modules = {name[:at] for name in parameters for at, char in enumerate(name) if char == "."}
    known = [*sorted(modules), *parameters, *others]
    close = difflib.get_close_matches(glob, known, n=3) or list(parameters)[:3]
    return f"; did you mean {', '.join(map(repr, close))}?" if close else ""


def _differentiable_inputs(spec: SharedSpec, tensors: TensorHeaders) -> list[str]:
    """Return the floating-point arguments as `inputs.NAME` and `inputs.GROUP.NAME`."""
    names = []
    for group in spec.inputs:
        shard = group.shards[0]
        for name in tensors.arguments(shard, where=f"shard 0 of group {group.name!r}"):
            reference = TensorRef(blob=shard.blob, tensor=shard.prefix + name)
            if tensors.entry(reference, where=name).dtype in FLOATING:
                names += [f"inputs.{name}", f"inputs.{group.name}.{name}"]
    return names


def suggestion(name: str, names: list[str]) -> str:
    """Return a clause that names what may have been meant."""
    close = difflib.get_close_matches(name, names, n=1) or names[:3]
    return f"; there is {', '.join(map(repr, close))}" if close else ""
