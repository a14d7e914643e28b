"""Functions of a job, traced to graphs, and what they read beside the model's outputs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from gradbox.errors import InvalidInputs, InvalidJob
from gradbox.inputs.uploads import Uploads
from gradbox.protocol import TensorRef, TracedFunction
from gradbox.protocol.spec_fields import IDENTIFIER, FunctionTensor, Scalar
from gradbox.tensors.tensor_bytes import is_tensor, is_torch_importable


def split_tensors_and_scalars(
    given: Mapping[str, Any], *, what: str
) -> tuple[dict[str, Any], dict[str, Scalar]]:
    """Part tensors, which are uploaded, from plain values, which become part of the function.

    Raises:
        InvalidInputs: a value is neither, or a name cannot be an argument's.
    """
    if not isinstance(given, Mapping):
        raise InvalidInputs(
            f"{what}: expected {{name: tensor or number}}, the names being arguments of the "
            f"function, got {type(given).__name__}"
        )
    scalars: dict[str, Scalar] = {}
    tensors: dict[str, Any] = {}
    for name, given_value in given.items():
        if not isinstance(name, str) or IDENTIFIER.fullmatch(name) is None:
            raise InvalidInputs(
                f"{what}: expected names of arguments, up to 100 of a-z, A-Z, 0-9 and _, got "
                f"{name!r:.120}"
            )
        value = given_value.item() if isinstance(given_value, np.generic) else given_value
        if value is None or isinstance(value, bool | int | float | str):
            scalars[name] = value
        elif is_tensor(value):
            tensors[name] = value
        else:
            raise InvalidInputs(
                f"{what}[{name!r}]: expected a tensor, a NumPy array, a number, a string or None, "
                f"got {type(given_value).__name__}; convert it with torch.as_tensor"
            )
    return tensors, scalars


def uploaded(tensors: Mapping[str, Any], uploads: Uploads, *, where: str) -> dict[str, TensorRef]:
    """Upload tensors and return references to them, which say what requires grad.

    Args:
        where: as for `Uploads.named`.
    """
    return {
        name: ref.model_copy(
            update={"requires_grad": bool(getattr(tensors[name], "requires_grad", False))}
        )
        for name, ref in uploads.named(tensors, where=where).items()
    }


# How each function is called: what an error ends with where one takes other arguments.
CALLED: Final = {
    "loss": "one unnamed group of inputs is the first argument; several groups and all loss_inputs "
    "go by their names",
    "readout": "a readout is called as readout(output, inputs)",
    "inner": "inner is given the members of y by their names, and v = G(z)",
    "outer": "outer is given dfdz, then the members of x by their names",
}


def traced(
    function: Any, uploads: Uploads, *, what: str, structured: bool = False, **arguments: Any
) -> TracedFunction:
    """Trace a function and upload the tensors that it reads.

    Args:
        what: what an error calls it.
        structured: its arguments may be dicts or a model's output, as a readout's are.
        arguments: as `gradbox.tracing.trace.trace` takes them.

    Raises:
        InvalidJob: it is no function, or torch is not installed.
        InvalidInputs: it takes other arguments than it is given.
        UntraceableLoss, GraphRefused: as `trace` raises them.
    """
    if not callable(function):
        wanted = "a function or an nn.Module"
        if what == "loss":
            wanted += ", or for a loss of gradbox's own Builtin('info_nce')"
        raise InvalidJob(f"{what}: expected {wanted}, got {function!r}")
    if isinstance(function, type):
        raise InvalidJob(
            f"{what}: expected a function or an nn.Module, got the class {function.__name__} "
            f"itself; pass an instance of it, {function.__name__}(...)"
        )
    if not is_torch_importable():
        raise InvalidJob(
            f"{what}: a function can only be traced where torch is installed: "
            f"pip install 'gradbox[torch]', or use a Builtin"
        )
    from gradbox.tracing.trace import trace

    try:
        found = trace(function, structured=structured, **arguments)
    except InvalidInputs as error:
        called = CALLED.get(what, "it is called with one tensor")
        raise InvalidInputs(f"{what}: {error}; {called}") from None
    refs = uploads.named(found.tensors, where=f"{what}: tensors")
    return TracedFunction(
        graph=found.graph,
        tensors={
            name: FunctionTensor(
                blob=ref.blob,
                tensor=ref.tensor,
                requires_grad=name in found.parameters,
                buffer=name in found.buffers,
            )
            for name, ref in refs.items()
        },
    )
