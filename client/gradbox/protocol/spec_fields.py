"""What the specs of all computations are made of.

A spec holds no tensors: it names blobs by digest and tensors inside them by name.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Final, Literal, Self

from pydantic import (
    AfterValidator,
    ConfigDict,
    Field,
    StrictBool,
    StringConstraints,
    model_validator,
)
from pydantic_core import PydanticCustomError

from gradbox.graphs.schema import Graph
from gradbox.graphs.wire_form import NUMBER, Entries, Items, WireForm
from gradbox.protocol.options import GradientOptions, JobOptions

PROTOCOL: Final = 1

# A remote callable makes every call a group of its own.
MAX_GROUPS: Final = 1000

# What digests, names and ids are made of; each is matched whole.
DIGEST: Final = re.compile(r"[0-9a-f]{64}")
IDENTIFIER: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,99}")
JOB_ID: Final = re.compile(r"[A-Za-z0-9_-]{1,100}")

Digest = Annotated[str, StringConstraints(pattern=f"^{DIGEST.pattern}$")]
Identifier = Annotated[str, StringConstraints(pattern=f"^{IDENTIFIER.pattern}$")]
JobId = Annotated[str, StringConstraints(pattern=f"^{JOB_ID.pattern}$")]
StreamNumber = Annotated[int, Field(ge=0, lt=2**63), NUMBER]
# Part of addresses.
SaveName = Annotated[
    str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=100)
]
TensorName = Annotated[str, StringConstraints(min_length=1, max_length=500)]
Scalar = bool | int | float | str | None


class Wire(WireForm, frozen=True):
    """A form whose numbers are finite: JSON has no other, and infinity would come back as null."""

    model_config = ConfigDict(allow_inf_nan=False)


class TensorRef(Wire, frozen=True):
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


class ShardRef(Wire, frozen=True):
    """The arguments of one call of the model: a blob's tensors whose names begin with `prefix`.

    What follows the prefix is the argument's name; a whole number is a position, `0` the first.
    `stream` are the numbers (k, i) that the shard's random stream is derived from, beside the seed;
    by default its group's position and its own.
    """

    blob: Digest
    prefix: str = Field(default="", max_length=500)
    stream: tuple[StreamNumber, StreamNumber] | None = None


class InputGroup(Wire, frozen=True):
    """One list of shards, all put through one entry point of the model.

    `order` is the permutation that makes the loss's Z out of the shards' outputs, one after the
    other: Z = cat(z_1..z_n)[order].
    """

    name: Identifier = "z"
    shards: Annotated[Items[ShardRef], Field(min_length=1, max_length=1_000_000)]
    method: str = "forward"
    order: ConstantRef | None = None


class FunctionTensor(TensorRef, frozen=True):
    """A tensor that a graph reads: a parameter with `requires_grad`, or a `buffer`, or a constant.

    Gradients of parameters come back; so do the values that a loss leaves in its buffers, where
    `returns` asks for buffers.
    """

    buffer: StrictBool = False


class TracedFunction(Wire, frozen=True):
    """A graph with the constants, parameters and buffers that it reads."""

    graph: Graph
    tensors: Entries[str, FunctionTensor] = {}


def _requires_kind(schema: dict[str, Any]) -> None:
    """Say so in the schema: the kind tells losses apart, so whoever writes one needs it."""
    schema["required"] = ["kind", *schema["required"]]


class LossKind(Wire, frozen=True):
    model_config = ConfigDict(json_schema_extra=_requires_kind)


class GraphLoss(LossKind, frozen=True):
    """A loss that the client traced."""

    kind: Literal["graph"] = "graph"
    function: TracedFunction


class BuiltinLoss(LossKind, frozen=True):
    """A loss that is part of gradbox, by name: see `gradbox.losses`."""

    kind: Literal["builtin"] = "builtin"
    name: Identifier
    options: Entries[Identifier, Scalar] = {}


class CotangentsLoss(LossKind, frozen=True):
    """A loss that ran elsewhere: ∂L/∂Z at the outputs of the job `forward`.

    `tensors` go by GROUP, or by GROUP/NAME where the readout gave several, as that job's outputs
    do, and have their shapes. Missing ones are zero.
    """

    kind: Literal["cotangents"] = "cotangents"
    forward: JobId
    tensors: Annotated[Entries[TensorName, ConstantRef], Field(min_length=1)]


class PenaltySpec(Wire, frozen=True):
    """A term Σᵢ weight · loss(tapᵢ), tapᵢ being what submodule `at` gives for shard i.

    `at` may name an element of that: "encoder[last_hidden_state]". `per_sample_scale` maps a
    shard's z to one number a sample, by which that sample's gradient of the penalty is multiplied.
    """

    at: Annotated[str, StringConstraints(min_length=1, max_length=500)]
    loss: TracedFunction
    weight: Annotated[float, NUMBER] = 1.0
    per_sample_scale: TracedFunction | None = None


LossSpec = Annotated[GraphLoss | BuiltinLoss | CotangentsLoss, Field(discriminator="kind")]


class StateRef(Wire, frozen=True):
    """The state of a run: after its step `step`, as it was saved under `save`, or the newest.

    A save is named apart from its run, so either is enough.
    """

    run: JobId | None = None
    step: Annotated[int, Field(ge=0, lt=2**53), NUMBER] | None = None
    save: SaveName | None = None

    @model_validator(mode="after")
    def _of_something(self) -> Self:
        if self.run is None and self.save is None:
            raise PydanticCustomError("state", "expected a run or a save")
        return self


class SharedSpec(Wire, JobOptions, frozen=True):
    """The fields of every computation: its options, and what the model is called with.

    `state` is a run whose weights and buffers are laid over the model's, before `weights`. With
    `estimate` the job measures what it would take, on a few of its shards, and computes no more.
    """

    protocol: Annotated[Literal[1], NUMBER] = PROTOCOL
    model: Annotated[str, StringConstraints(min_length=1, max_length=300)]
    inputs: Annotated[Items[InputGroup], Field(min_length=1, max_length=MAX_GROUPS)]
    readout: TracedFunction | None = None
    weights: Entries[str, ConstantRef] = {}
    state: StateRef | None = None
    estimate: StrictBool = False


class DifferentiatedSpec(SharedSpec, GradientOptions, frozen=True):
    """The fields of computations that give gradients of the model's own parameters."""

    wrt: Annotated[Items[str], Field(min_length=1)] | None = None
