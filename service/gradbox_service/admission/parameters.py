"""Do the names in `wrt` and `weights` belong to the model?"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

from gradbox.errors import InvalidInputs
from gradbox.protocol import DifferentiatedSpec, ModelView, SharedSpec, TensorRef
from gradbox_service.admission.tensors import TensorHeaders


def check_weights(spec: SharedSpec, *, model: ModelView, tensors: TensorHeaders) -> None:
    """Check the tensors that are laid over the model's own.

    Raises:
        InvalidInputs: the model has no parameter or buffer of that name, or of another shape.
    """
    shapes = {view.name: view.shape for view in (*model.parameters, *model.buffers)}
    shapes |= {name: shapes[first] for name, first in model.tied.items()}
    lacks = f"weights: model {model.name!r} has no parameter or buffer"
    check_shapes("weights", spec.weights, shapes, tensors=tensors, lacks=lacks)


def check_shapes(
    where: str,
    named: Mapping[str, TensorRef],
    shapes: Mapping[str, Sequence[int]],
    *,
    tensors: TensorHeaders,
    lacks: str,
    rows: bool = False,
) -> None:
    """Check that tensors have the names and shapes of a model's.

    Args:
        shapes: of the model's, by name.
        lacks: says that the model has no tensor of a name, which follows.
        rows: whether each has rows of that shape, so many as there are.

    Raises:
        InvalidInputs: one has not.
    """
    for name, reference in named.items():
        if name not in shapes:
            close = difflib.get_close_matches(name, shapes, n=1) or list(shapes)[:3]
            there_is = f"; there is {', '.join(map(repr, close))}" if close else ""
            raise InvalidInputs(f"{lacks} {name!r}{there_is}")
        got = list(tensors.entry(reference, where=f"{where}.{name}").shape)
        wanted = [*got[:1], *shapes[name]] if rows else shapes[name]
        if got != wanted:
            raise InvalidInputs(f"{where}.{name}: expected the shape {wanted}, got {got}")


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
        if not matching(glob, parameters) and not any(
            name == glob or fnmatchcase(name, glob) for name in inputs
        ):
            raise InvalidInputs(
                f"wrt: {glob!r} matches no parameter or module of model {model.name!r}, no "
                f"parameter of the loss, and no floating-point input"
                f"{near_misses(glob, parameters, inputs)}"
            )


def check_names(wrt: Sequence[str] | None, *, model: ModelView) -> None:
    """Check what a job is to differentiate by that takes parameters of the model alone.

    Raises:
        InvalidInputs: a pattern matches no parameter.
    """
    names = model.parameter_names()
    for glob in wrt or ():
        if not matching(glob, names):
            raise InvalidInputs(
                f"wrt: {glob!r} matches no parameter or module of model {model.name!r}, and this "
                f"computation differentiates by nothing else{near_misses(glob, names)}"
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


def check_dtypes_of_gradients(spec: DifferentiatedSpec, *, model: ModelView) -> None:
    """Check that a result can hold the gradients, each of its parameter's dtype.

    Raises:
        InvalidInputs: one is complex128, for which safetensors has no name.
    """
    too_wide = ("complex64", "complex128") if spec.widened else ("complex128",)
    names = {view.name for view in model.parameters if view.dtype in too_wide}
    if names and spec.wrt is not None:
        known = model.parameter_names()
        named = {name for glob in spec.wrt for name in matching(glob, known)}
        names &= {model.tied.get(name, name) for name in named}
    if names:
        raise InvalidInputs(
            f"wrt: expected gradients that safetensors can hold, got those of {sorted(names)}, "
            f"which are complex128 at precision {spec.precision!r}; leave them out by wrt, or "
            f"register the model with complex64, or with real parameters, by torch.view_as_real"
        )


def matching(glob: str, parameters: Sequence[str]) -> list[str]:
    """Return the names that a glob is, or that are in a module of this name.

    Only where there are none is it read as a glob: names may have `[`, `]`, `?` and `*`.
    """
    exact = [name for name in parameters if name == glob or name.startswith(f"{glob}.")]
    below = f"{glob}.*"
    return exact or [n for n in parameters if fnmatchcase(n, glob) or fnmatchcase(n, below)]


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
        where = f"shard 0 of group {group.name!r}"
        for name in tensors.floating_arguments(group.shards[0], where=where):
            names += [f"inputs.{name}", f"inputs.{group.name}.{name}"]
    return names
