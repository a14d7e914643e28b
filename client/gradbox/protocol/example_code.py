"""A Python program that runs one job on a model: what `model_info(NAME).example_code()` returns."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from gradbox.protocol.views import ExampleInput, ModelView

PROGRAM: Final = """\
import torch

from gradbox import GradClient, Gradient


def loss(z):
    return z.square().mean()


shard = {{
{inputs}
}}
with GradClient() as client:
    job = client.submit(
        Gradient(
{arguments}
        )
    )
    result = job.result()
print(f"loss {{result.loss:.6g}}, gradients of {{len(result.grads)}} parameters")
"""


def example_code(model: ModelView) -> str:
    """Return the program for a model; comments mark what the worker could not find out."""
    example = model.example
    arguments = [f"model={model.name!r}", "inputs=[shard, shard]"]
    if example is not None:
        inputs = [f"    {given.name!r}: {_tensor(given)}," for given in example.inputs]
        if example.method != "forward":
            arguments.append(f"method={example.method!r}")
        if example.output is not None:
            arguments.append(f"output={example.output!r}")
    else:
        inputs = [f"    {name!r}: ...,  # a tensor" for name in _needed(model)]
        inputs.insert(0, "    # the worker found no inputs that this model takes: write yours here")
    arguments.append("loss=loss")
    return PROGRAM.format(
        inputs="\n".join(inputs).replace("'", '"'),
        arguments="\n".join(f"            {given}," for given in arguments).replace("'", '"'),
    )


def _tensor(given: ExampleInput) -> str:
    shape = ", ".join(map(str, given.shape))
    dtype = "" if given.dtype == "float32" else f", dtype=torch.{given.dtype}"
    if given.high is None:
        return f"torch.randn({shape}{dtype})"
    if given.high == 2:  # a mask that masks nothing
        return f"torch.ones({shape}{dtype})"
    long = "" if given.dtype == "int64" else dtype
    return f"torch.randint({given.high}, ({shape},){long})"


def _needed(model: ModelView) -> list[str]:
    """Return the arguments that the first entry point cannot be called without."""
    first = next(iter(model.methods.values()), None)
    return [] if first is None else first.required or first.arguments[:1]
