"""The options of a job: said once here, for the constructors, the specs, the box and the engine.

    RunOptions         how a job runs, and how its result travels, whatever it computes
    JobOptions         and how the model is called
    GradientOptions    and what is kept of the first pass, where there are two

A computation is made with them, a spec has them as fields of the same names, and what the engine's
`CallOptions` names of them is handed to it as it came. So an option is added here, in the
engine's `requests`, and where the engine reads it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Annotated, Any, Final, Literal, TypedDict

from pydantic import Field, StringConstraints

from gradbox.graphs.wire_form import NUMBER

MAX_DEVICES: Final = 10_000
DEFAULT_TIMEOUT_S: Final = 3600.0

Mode = Literal["eval", "train"]
Precision = Literal["fp32", "tf32", "bf16", "fp16", "fp64"]
Transfer = Literal["exact", "bf16", "fp16"]
# The dtype in which numbers travel, as torch spells it.
TRANSFER_DTYPES: Final[Mapping[Transfer, str]] = {"bf16": "bfloat16", "fp16": "float16"}
Output = str | Annotated[int, NUMBER] | None
Seed = Annotated[int, Field(ge=0, lt=2**63), NUMBER]
Retain = Literal["auto"] | Annotated[int, Field(ge=0), NUMBER]
Priority = Annotated[int, Field(ge=-10, le=10), NUMBER]
Timeout = Annotated[float, Field(gt=0, le=7 * 24 * 3600), NUMBER]
Devices = Literal["auto"] | Annotated[int, Field(ge=1, le=MAX_DEVICES), NUMBER]
Recompute = Annotated[str, StringConstraints(min_length=1, max_length=200)]
Name = Annotated[str, StringConstraints(max_length=200)]


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """How a job runs, and how its result travels.

    Args:
        transfer: the format of gradients in the result file: "bf16" and "fp16" halve the bytes. The
            result gives them back in the dtype that they had; its receipt states the rounding.
            Tensors of `weights` may then come in this format, too, and are widened on the box to
            the dtype of the parameter.
        priority: from -10 to 10; higher goes first. Above 0 needs the token of the box's owner.
        timeout_s: seconds that the job may run, up to a week.
        devices: how many devices of the box's cluster the job may run on at once: at most so many,
            of those that are idle when it starts, or "auto" for all of them. It never waits for
            more than one.
        name: what listings show.
    """

    transfer: Transfer = "exact"
    priority: Priority = 0
    timeout_s: Timeout = DEFAULT_TIMEOUT_S
    devices: Devices = 1
    name: Name = ""


@dataclass(frozen=True, kw_only=True)
class JobOptions(RunOptions):
    """And how the model is called.

    Args:
        output: which part of the model's output is z: a name or an index. Not needed if the model
            returns one tensor.
        mode: "train" calls the model as `model.train()` does, with dropout and batch statistics.
        seed: of the random streams; shard i of group k draws from (seed, k, i) alone.
        precision: "fp32" computes in the weights' own dtype; "tf32", "bf16" and "fp16" in less
            where the model's arithmetic can, "fp64" in float64 throughout. Gradients are summed in
            float32 or wider.
        streams: whether random numbers belong to shards, or to samples ("sample"), so that another
            cut into shards gives the same gradient.
        recompute: which blocks of the model are computed again in a shard's backward pass, so that
            of each only the inputs are kept: "blocks" are the repeated children of its `ModuleList`
            and `Sequential` modules, a pattern like "encoder.layer.*" names others, "off" is none.
            "auto" does it for shards that do not fit otherwise. Gradients are the same.
    """

    output: Output = None
    mode: Mode = "eval"
    seed: Seed = 0
    precision: Precision = "fp32"
    streams: Literal["shard", "sample"] = "shard"
    recompute: Recompute = "auto"

    @property
    def widened(self) -> bool:
        """Whether what is floating-point becomes float64: weights, inputs, tensors of functions."""
        return self.precision == "fp64"


@dataclass(frozen=True, kw_only=True)
class GradientOptions(JobOptions):
    """And what is kept of the first pass.

    Args:
        retain: memory in bytes for graphs kept from the first pass, so that fewer shards are
            replayed; 0 keeps one shard's graph at a time, "auto" takes what is free on the device.
    """

    retain: Retain = "auto"


class RunKeywords(TypedDict, total=False):
    """`RunOptions` as keywords."""

    transfer: Transfer
    priority: int
    timeout_s: float
    devices: int | Literal["auto"]
    name: str


class ModelKeywords(RunKeywords, total=False):
    """The options that `client.model` takes: `GradientOptions`, but for `streams`.

    A call is a shard of its own there.
    """

    output: str | int | None
    mode: Mode
    seed: int
    precision: Precision
    recompute: str
    retain: int | Literal["auto"]


def options_of(given: RunOptions, kind: type[RunOptions]) -> dict[str, Any]:
    """Return the options of a kind by name, as a constructor or a spec takes them."""
    return {field.name: getattr(given, field.name) for field in fields(kind)}


def option_names(kind: type[RunOptions]) -> frozenset[str]:
    """Return the names of the options of a kind."""
    return frozenset(field.name for field in fields(kind))
