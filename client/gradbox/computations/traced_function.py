"""Functions of a job, traced to graphs."""

from __future__ import annotations

from typing import Any

from gradbox.errors import InvalidJob
from gradbox.inputs.uploads import Uploads
from gradbox.protocol import TracedFunction
from gradbox.protocol.spec_fields import FunctionTensor
from gradbox.tensors.tensor_bytes import is_torch_importable, tensor_bytes


def traced(
    function: Any, uploads: Uploads, *, what: str, structured: bool = False, **arguments: Any
) -> TracedFunction:
    """Trace a function and upload the tensors that it reads.

    Args:
        what: what an error calls it.
        structured: its arguments may be dicts or a model's output, as a readout's are.
        arguments: as `gradbox.tracing.trace.trace` takes them.
    """
    if not callable(function):
        raise InvalidJob(
            f"{what}: expected a function, an nn.Module or a Builtin, got {function!r}; "
            f"a loss of gradbox's own is written Builtin('info_nce')"
        )
    if not is_torch_importable():
        raise InvalidJob(
            f"{what}: a function can only be traced where torch is installed: "
            f"pip install 'gradbox[torch]', or use a Builtin"
        )
    from gradbox.tracing.trace import trace

    found = trace(function, structured=structured, **arguments)
    refs = uploads.tensors(
        {
            name: tensor_bytes(t, where=f"{what}: tensor {name!r}")
            for name, t in found.tensors.items()
        }
    )
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
