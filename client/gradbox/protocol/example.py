"""A call that a model takes, and the Python program that runs a job on it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from pydantic import BaseModel, ConfigDict

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


class ExampleInput(BaseModel):
    """A tensor that a model takes. Whole numbers are drawn from 0 up to, not including, `high`."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    name: str
    shape: list[int]
    dtype: str
    high: int | None = None


class ExampleView(BaseModel):
    """One call that the worker has tried: an entry point, its inputs, and the output that is z."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    method: str
    inputs: list[ExampleInput]
    output: str | int | None = None
    output_shape: list[int]


def example_code(model: str, example: ExampleView | None, *, needed: Sequence[str]) -> str:
    """Return a program that runs a job on a model.

    Args:
        needed: the arguments that the program leaves to the reader where there is no example.
    """
    arguments = [f"model={model!r}", "inputs=[shard, shard]"]
    if example is not None:
        inputs = [f"    {given.name!r}: {_tensor(given)}," for given in example.inputs]
        if example.method != "forward":
            arguments.append(f"method={example.method!r}")
        if example.output is not None:
            arguments.append(f"output={example.output!r}")
    else:
        inputs = [f"    {name!r}: ...,  # a tensor" for name in needed]
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
    return f"torch.randint({given.high}, {tuple(given.shape)}{long})"
