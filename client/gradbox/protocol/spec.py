"""A job as it is posted to /v1/jobs.

Tensors never stand in a spec: it names blobs by digest and tensors inside them by name. Two specs
that mean the same job have the same canonical JSON and so the same digest.
"""

from __future__ import annotations

import hashlib
import json
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from gradbox.errors import InvalidJob
from gradbox.graphs.schema import Graph

PROTOCOL: Final = 1

Digest = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
Identifier = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$", max_length=100)]
TensorName = Annotated[str, StringConstraints(min_length=1, max_length=500)]
Scalar = bool | int | float | str | None
Returned = Literal["grads", "input_grads", "outputs", "cotangents", "buffers"]


class Wire(BaseModel):
    """Frozen, and strict about fields it does not know: a typo is an error, not a default.

    Numbers are finite: JSON has no other, and an infinity would be written back as null.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class TensorRef(Wire):
    """One tensor of one uploaded safetensors blob."""

    blob: Digest
    tensor: TensorName
    requires_grad: bool = False


class ShardRef(Wire):
    """The arguments of one call of the model: a blob's tensors whose names begin with `prefix`.

    What follows the prefix is the argument's name; a whole number is a position, `0` the first.
    """

    blob: Digest
    prefix: str = Field(default="", max_length=500)


class InputGroup(Wire):
    """One list of shards, all put through one entry point of the model.

    `order` is the permutation that makes the loss's Z out of the shards' outputs, one after the
    other: Z = cat(z_1..z_n)[order].
    """

    name: Identifier = "z"
    shards: Annotated[list[ShardRef], Field(min_length=1, max_length=1_000_000)]
    method: str = "forward"
    order: TensorRef | None = None


class TracedFunction(Wire):
    """A graph with the constants and parameters that it reads.

    The tensors that have `requires_grad` are parameters: their gradients come back.
    """

    graph: Graph
    tensors: dict[str, TensorRef] = {}


class GraphLoss(Wire):
    """A loss that the client traced."""

    kind: Literal["graph"] = "graph"
    function: TracedFunction


class BuiltinLoss(Wire):
    """A loss that gradbox carries, by name: see `gradbox.losses`."""

    kind: Literal["builtin"] = "builtin"
    name: Identifier
    options: dict[Identifier, Scalar] = {}


class PenaltySpec(Wire):
    """A term Σᵢ weight · loss(tapᵢ), tapᵢ being what submodule `at` gives for shard i.

    `at` may name an element of that: "encoder[last_hidden_state]". `per_sample_scale` maps a
    shard's z to one number a sample, by which that sample's gradient of the penalty is multiplied.
    """

    at: Annotated[str, StringConstraints(min_length=1, max_length=500)]
    loss: TracedFunction
    weight: float = 1.0
    per_sample_scale: TracedFunction | None = None


LossSpec = Annotated[GraphLoss | BuiltinLoss, Field(discriminator="kind")]


class SharedSpec(Wire):
    """What every computation is told."""

    protocol: Literal[1] = PROTOCOL
    model: Annotated[str, StringConstraints(min_length=1, max_length=300)]
    inputs: Annotated[list[InputGroup], Field(min_length=1, max_length=16)]
    output: str | int | None = None
    readout: TracedFunction | None = None
    mode: Literal["eval", "train"] = "eval"
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    precision: Literal["fp32", "tf32", "bf16", "fp16", "fp64"] = "fp32"
    retain: Literal["auto"] | Annotated[int, Field(ge=0)] = "auto"
    streams: Literal["shard", "sample"] = "shard"
    wrt: Annotated[list[str], Field(min_length=1)] | None = None
    weights: dict[str, TensorRef] = {}
    priority: Annotated[int, Field(ge=-10, le=10)] = 0
    timeout_s: Annotated[float, Field(gt=0, le=7 * 24 * 3600)] = 3600.0
    name: Annotated[str, StringConstraints(max_length=200)] = ""


class GradientSpec(SharedSpec):
    """dL/dθ of a loss over all shards."""

    computation: Literal["gradient"] = "gradient"
    loss: LossSpec
    loss_inputs: dict[Identifier, TensorRef | Scalar] = {}
    penalties: Annotated[list[PenaltySpec], Field(max_length=1000)] = []
    returns: Annotated[list[Returned], Field(min_length=1)] = ["grads"]


JobSpec = GradientSpec


def parse_spec(body: bytes | str | dict[str, Any]) -> JobSpec:
    """Read a job spec.

    Raises:
        InvalidJob: it is not JSON, or not a job; the message names the field, what was expected
            and what came.
    """
    try:
        if isinstance(body, dict):
            return JobSpec.model_validate(body)
        return JobSpec.model_validate_json(body)
    except ValidationError as error:
        raise InvalidJob(describe_validation(error)) from None


def describe_validation(error: ValidationError) -> str:
    """Say in sentences which fields are wrong and how, at most five of them."""
    found = error.errors(include_url=False, include_context=False)
    lines = []
    for item in found[:5]:
        where = ".".join(str(part) for part in item["loc"]) or "the body"
        got = repr(item["input"])
        lines.append(f"{where}: {item['msg']} (got {got[:120]}{'…' if len(got) > 120 else ''})")
    if len(found) > 5:
        lines.append(f"and {len(found) - 5} more")
    return "; ".join(lines)


def spec_digest(spec: JobSpec) -> str:
    """Return the SHA-256 of the spec's canonical JSON (sorted keys, no spaces, no defaults)."""
    plain = spec.model_dump(mode="json", exclude_defaults=True)
    text = json.dumps(plain, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()
