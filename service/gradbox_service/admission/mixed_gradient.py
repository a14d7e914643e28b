"""What only a `MixedGradient` has to fulfil: its functions fit y, x and the shards."""

from __future__ import annotations

from gradbox.errors import InvalidInputs
from gradbox.graphs.check import arguments_of, check_graph
from gradbox.protocol import MixedGradientSpec, ModelView, TensorRef
from gradbox_service.admission.tensors import FLOATING, TensorHeaders


def check(spec: MixedGradientSpec, *, model: ModelView, tensors: TensorHeaders) -> None:
    """Check the job.

    Raises:
        GraphRefused: `inner` or `outer` is not an allowed graph.
        InvalidInputs: their arguments are not what y and x give, z is not a floating-point argument
            of the shards, or nothing is differentiated by.
    """
    both = sorted(spec.y.keys() & spec.x.keys())
    if both:
        raise InvalidInputs(f"x: expected other names than those in y, got {both} in both")
    for function in (spec.inner, spec.outer):
        check_graph(function.graph, function.tensors)
    _check_inner(spec)
    _check_outer(spec)
    _check_leaves(spec, tensors)
    _check_z(spec, tensors)


def _check_inner(spec: MixedGradientSpec) -> None:
    arguments = arguments_of(spec.inner.graph)
    others = [name for name in arguments if name not in spec.y]
    if len(others) != 1 or not spec.y.keys() <= set(arguments):
        raise InvalidInputs(
            f"inner: expected the members of y, {sorted(spec.y)}, and one argument more, which is "
            f"the model's output v; got {arguments}"
        )


def _check_outer(spec: MixedGradientSpec) -> None:
    arguments = arguments_of(spec.outer.graph)
    by_name = set(arguments[1:])
    if not arguments or not spec.x.keys() <= by_name or not by_name <= {*spec.x, *spec.y}:
        raise InvalidInputs(
            f"outer: expected dfdz first and then, by name, all of x, {sorted(spec.x)}, and what "
            f"it reads of y, {sorted(spec.y)}; got {arguments}"
        )


def _check_leaves(spec: MixedGradientSpec, tensors: TensorHeaders) -> None:
    leaves: dict[str, TensorRef] = {f"y.{name}": ref for name, ref in spec.y.items()}
    for where, function in (("inner", spec.inner), ("outer", spec.outer)):
        leaves |= {f"{where}.{name}": ref for name, ref in function.tensors.items()}
    wanted = {name: ref for name, ref in leaves.items() if ref.requires_grad}
    if not wanted:
        raise InvalidInputs(
            "y: expected something to differentiate by, a floating-point tensor in y or a "
            "parameter of inner, got none that requires grad"
        )
    for name, reference in wanted.items():
        dtype = tensors.entry(reference, where=name).dtype
        if dtype not in FLOATING:
            raise InvalidInputs(f"{name}: expected a floating-point tensor, got {dtype}")


def _check_z(spec: MixedGradientSpec, tensors: TensorHeaders) -> None:
    floating = tensors.floating_arguments(spec.inputs[0].shards[0], where="shard 0")
    if not floating or (spec.z is not None and spec.z not in floating):
        raise InvalidInputs(
            f"z: expected a floating-point argument of the shards, which are {sorted(floating)}, "
            f"got {spec.z!r}; an integer argument has no derivative"
        )
