"""Functions of a job, traced to graphs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from gradbox.errors import InvalidInputs, InvalidJob
from gradbox.graphs.derivative import may_have_derivative
from gradbox.inputs.uploads import Uploads
from gradbox.protocol import TensorRef, TracedFunction
from gradbox.protocol.spec_fields import FunctionTensor
from gradbox.tensors.tensor_bytes import is_torch_importable

CONSTANT_LOSS: Final = (
    "loss: expected a number that can be differentiated by the model's outputs, got one that no "
    "path leads to from them: detach(), argmax, comparisons, integers and torch.no_grad() cut the "
    "path; compute it from the outputs by functions that have a derivative"
)
# How each function is called: what an error ends with where one takes other arguments.
CALLED: Final = {
    "loss": "one unnamed group of inputs is the first argument; several groups and all loss_inputs "
    "go by their names",
    "readout": "a readout is called as readout(output, inputs)",
    "inner": "inner is given the members of y by their names, and v = G(z)",
    "outer": "outer is given dfdz, then the members of x by their names",
}


def check_derivative(function: TracedFunction, arguments: Mapping[str, TensorRef]) -> None:
    """Check that a loss can be differentiated, as far as its graph shows it.

    Args:
        arguments: what it reads beside the model's outputs.

    Raises:
        InvalidInputs: it depends on nothing that has a derivative.
    """
    constants = {name for name, ref in arguments.items() if not ref.requires_grad}
    trainable = {name for name, ref in function.tensors.items() if ref.requires_grad}
    if not may_have_derivative(function.graph, constants=constants, trainable=trainable):
        raise InvalidInputs(CONSTANT_LOSS)


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
