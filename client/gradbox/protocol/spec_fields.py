"""What the specs of all computations are made of.

A spec holds no tensors: it names blobs by digest and tensors inside them by name.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    StrictBool,
    StringConstraints,
)
from pydantic_core import PydanticCustomError

from gradbox.graphs.schema import Graph
from gradbox.graphs.wire_form import Entries, Items, WireForm

PROTOCOL: Final = 1

# A remote callable makes every call a group of its own.
MAX_GROUPS: Final = 1000
MAX_DEVICES: Final = 10_000


def _no_other_than_a_number(value: Any) -> Any:
    """Refuse what Python, or Pydantic, would read as a number: `true` is not 1, nor is "1"."""
    if isinstance(value, bool | str | bytes):
        raise PydanticCustomError("number", "a number is needed, and no boolean or string")
    return value


# Behind the type and bounds of every numeric field of a spec: before them, JSON Schema loses those.
NUMBER: Final = BeforeValidator(_no_other_than_a_number)

Digest = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
Identifier = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$", max_length=100)]
JobId = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_-]+$", max_length=100)]
StreamNumber = Annotated[int, Field(ge=0, lt=2**63), NUMBER]
TensorName = Annotated[str, StringConstraints(min_length=1, max_length=500)]
Priority = Annotated[int, Field(ge=-10, le=10), NUMBER]
Timeout = Annotated[float, Field(gt=0, le=7 * 24 * 3600), NUMBER]
DEFAULT_TIMEOUT_S: Final = 3600.0
Name = Annotated[str, StringConstraints(max_length=200)]
Devices = Literal["auto"] | Annotated[int, Field(ge=1, le=MAX_DEVICES), NUMBER]
Scalar = bool | int | float | str | None
Transfer = Literal["exact", "bf16", "fp16"]


class Wire(WireForm):
    """A form whose numbers are finite: JSON has no other, and infinity would come back as null."""

    model_config = ConfigDict(allow_inf_nan=False)


class TensorRef(Wire):
    """One tensor of one uploaded safetensors blob."""

    blob: Digest
    tensor: TensorName
    requires_grad: StrictBool = False


def _without_gradient(reference: TensorRef) -> TensorRef:
    if reference.requires_grad:
        raise PydanticCustomError(
            "constant", "no gradient of this tensor is computed: leave requires_grad out"
        )
    return reference


ConstantRef = Annotated[TensorRef, AfterValidator(_without_gradient)]


class ShardRef(Wire):
    """The arguments of one call of the model: a blob's tensors whose names begin with `prefix`.

    What follows the prefix is the argument's name; a whole number is a position, `0` the first.
    `stream` are the numbers (k, i) that the shard's random stream is derived from, beside the seed;
    by default its group's position and its own.
    """

    blob: Digest
    prefix: str = Field(default="", max_length=500)
    stream: tuple[StreamNumber, StreamNumber] | None = None


class InputGroup(Wire):
    """One list of shards, all put through one entry point of the model.

    `order` is the permutation that makes the loss's Z out of the shards' outputs, one after the
    other: Z = cat(z_1..z_n)[order].
    """

    name: Identifier = "z"
    shards: Annotated[Items[ShardRef], Field(min_length=1, max_length=1_000_000)]
    method: str = "forward"
    order: ConstantRef | None = None


class FunctionTensor(TensorRef):
    """A tensor that a graph reads: a parameter with `requires_grad`, or a `buffer`, or a constant.

    Gradients of parameters come back; so do the values that a loss leaves in its buffers, where
    `returns` asks for buffers.
    """

    buffer: StrictBool = False


class TracedFunction(Wire):
    """A graph with the constants, parameters and buffers that it reads."""

    graph: Graph
    tensors: Entries[str, FunctionTensor] = {}


def _requires_kind(schema: dict[str, Any]) -> None:
    """Say so in the schema: the kind tells losses apart, so whoever writes one needs it."""
    schema["required"] = ["kind", *schema["required"]]


class LossKind(Wire):
    model_config = ConfigDict(json_schema_extra=_requires_kind)


class GraphLoss(LossKind):
    """A loss that the client traced."""

    kind: Literal["graph"] = "graph"
    function: TracedFunction


class BuiltinLoss(LossKind):
    """A loss that is part of gradbox, by name: see `gradbox.losses`."""

    kind: Literal["builtin"] = "builtin"
    name: Identifier
    options: Entries[Identifier, Scalar] = {}


class CotangentsLoss(LossKind):
    """A loss that ran elsewhere: ∂L/∂Z at the outputs of the job `forward`.

    `tensors` go by GROUP, or by GROUP/NAME where the readout gave several, as that job's outputs
    do, and have their shapes. Missing ones are zero.
    """

    kind: Literal["cotangents"] = "cotangents"
    forward: JobId
    tensors: Annotated[Entries[TensorName, ConstantRef], Field(min_length=1)]


class PenaltySpec(Wire):
    """A term Σᵢ weight · loss(tapᵢ), tapᵢ being what submodule `at` gives for shard i.

    `at` may name an element of that: "encoder[last_hidden_state]". `per_sample_scale` maps a
    shard's z to one number a sample, by which that sample's gradient of the penalty is multiplied.
    """

    at: Annotated[str, StringConstraints(min_length=1, max_length=500)]
    loss: TracedFunction
    weight: Annotated[float, NUMBER] = 1.0
    per_sample_scale: TracedFunction | None = None


LossSpec = Annotated[GraphLoss | BuiltinLoss | CotangentsLoss, Field(discriminator="kind")]


class SharedSpec(Wire):
    """The fields of every computation.

    `transfer` is the format of the result's gradients, and one in which `weights` may come: the box
    widens those to the dtype of the parameter. `devices` is how many the job may run on at once:
    at most so many, of those that are idle when it starts; "auto" is all of them.
    """

    protocol: Annotated[Literal[1], NUMBER] = PROTOCOL
    model: Annotated[str, StringConstraints(min_length=1, max_length=300)]
    inputs: Annotated[Items[InputGroup], Field(min_length=1, max_length=MAX_GROUPS)]
    output: str | Annotated[int, NUMBER] | None = None
    readout: TracedFunction | None = None
    mode: Literal["eval", "train"] = "eval"
    seed: Annotated[int, Field(ge=0, lt=2**63), NUMBER] = 0
    precision: Literal["fp32", "tf32", "bf16", "fp16", "fp64"] = "fp32"
    streams: Literal["shard", "sample"] = "shard"
    weights: Entries[str, ConstantRef] = {}
    transfer: Transfer = "exact"
    priority: Priority = 0
    timeout_s: Timeout = DEFAULT_TIMEOUT_S
    devices: Devices = 1
    name: Name = ""

    @property
    def widened(self) -> bool:
        """Whether what is floating-point becomes float64: weights, inputs, tensors of functions."""
        return self.precision == "fp64"


class DifferentiatedSpec(SharedSpec):
    """The fields of computations that give gradients of the model's own parameters."""

    wrt: Annotated[Items[str], Field(min_length=1)] | None = None
    retain: Literal["auto"] | Annotated[int, Field(ge=0), NUMBER] = "auto"
