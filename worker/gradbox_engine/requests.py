"""What the engine is asked for, and what it answers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, Protocol, TypedDict

from torch import Tensor

from gradbox_engine.errors import BadInputs

Mode = Literal["eval", "train"]
Precision = Literal["fp32", "tf32", "bf16", "fp16", "fp64"]
Phase = Literal["forward", "cotangents", "replay", "samples", "products"]
Streams = Literal["shard", "sample"]
Recompute = str  # "off", "auto", "blocks", or a pattern over names of submodules
Retain = int | Literal["auto"]
Returned = Literal["grads", "buffers", "outputs", "cotangents", "input_grads"]
MixedReturned = Literal["grads", "dfdz"]
CurvatureKind = Literal["hessian", "ggn"]

Shard = Mapping[str, Any]
Z = Tensor | dict[str, Tensor]
"""A group's output as the loss sees it: one tensor, or a dict where the readout gave a dict."""

SOLE_GROUP = "z"
"""What a group is called where there is one and nobody named it."""


@dataclass(frozen=True)
class Group:
    """Shards that all go through one entry point of the model.

    `shards` may be lazy: each is read when it is used, and again for its replay; where it also has
    `form(index)`, that tells shapes and dtypes unread, by tensors on the meta device. A shard maps
    argument names to tensors on any device; a name that is a whole number is a position, "0" the
    first. `streams` are the numbers (k, i) that each shard's random stream is derived from, beside
    the seed; by default the group's position and the shard's own. `order` is the permutation that
    makes the loss's Z out of the concatenated outputs: Z = cat(z_1..z_n)[order].
    """

    name: str
    shards: Sequence[Shard]
    method: str = "forward"
    order: Sequence[int] | Tensor | None = None
    streams: Sequence[tuple[int, int]] | None = None


@dataclass(frozen=True)
class Objective:
    """The loss g.

    `function` receives Z as its first argument where there is one group, else one keyword per
    group, and `inputs` as keywords; it returns one number. `parameters` are leaves that
    the function reads: their gradients come back under the names given here.
    """

    function: Callable[..., Tensor]
    inputs: Mapping[str, Any] = field(default_factory=dict)
    parameters: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Penalty:
    """A term Σ_i weight · loss(tap_i) that is added to L, tap_i being an activation of shard i.

    `at` is the name of a submodule, whose output is the tap, or of an element of that output:
    "encoder.layer.3", "encoder.layer.3[0]", "encoder[last_hidden_state]". A submodule that runs
    several times in one call adds a term each time. `per_sample_scale` maps a shard's z to shape
    (b,): sample b's gradient of the penalty is multiplied by entry b, which is held constant; the
    value is not.
    """

    at: str
    loss: Callable[[Tensor], Tensor]
    weight: float = 1.0
    per_sample_scale: Callable[[Z], Tensor] | None = None


class CallKeywords(TypedDict, total=False):
    """The fields of `CallOptions` as an entry point takes them, each with its default."""

    seed: int
    mode: Mode
    precision: Precision
    output: str | int | None
    readout: Callable[[Any, dict[str, Any]], Any] | None
    weights: Mapping[str, Tensor] | None
    penalties: Sequence[Penalty]
    streams: Streams
    recompute: Recompute


@dataclass(frozen=True, kw_only=True)
class CallOptions:
    """How a job calls the model.

    The rooms that are named are those of `gradbox_engine.model`.

    Args:
        seed: of all random streams, see `calling.shard_rng`.
        mode: "train" and "eval" call the model as after `model.train()` and `model.eval()`.
        precision: the arithmetic of the model's calls, see `precision`.
        output: which part of the model's output is z: a name or an index, see `calling.outputs`.
        readout: (output, inputs) → z, run on every shard after `output`; a tensor, or a dict of
            tensors, with samples along dim 0.
        weights: part of a state dict, laid over the model's own for this call alone.
        penalties: terms on intermediate activations, see `calling.penalties`.
        streams: whether random numbers belong to shards or to samples, see `calling.sample_rng`.
        recompute: whose insides are computed again in the backward pass, see `calling.recompute`.
    """

    seed: int = 0
    mode: Mode = "eval"
    precision: Precision = "fp32"
    output: str | int | None = None
    readout: Callable[[Any, dict[str, Any]], Any] | None = None
    weights: Mapping[str, Tensor] | None = None
    penalties: Sequence[Penalty] = ()
    streams: Streams = "shard"
    recompute: Recompute = "auto"

    @property
    def widened(self) -> bool:
        """Whether weights, buffers, inputs and the loss's own tensors become float64."""
        return self.precision == "fp64"

    def without_penalties(self, entry_point: str) -> CallOptions:
        """Return these options.

        Raises:
            BadInputs: they have penalties, which the entry point would leave out.
        """
        if self.penalties:
            raise BadInputs(
                f"penalties: expected none for {entry_point}, got {len(self.penalties)}; "
                f"set_gradient takes them"
            )
        return self


@dataclass(frozen=True)
class Recomputed:
    """Blocks of the model whose insides were computed again, by name, and in how many shards."""

    blocks: tuple[str, ...] = ()
    shards: int = 0

    @classmethod
    def joined(cls, parts: Iterable[Recomputed]) -> Recomputed:
        """Return what several ranges of one job recomputed."""
        some = [part for part in parts if part.shards]
        return cls(some[0].blocks, sum(part.shards for part in some)) if some else cls()


NOT_RECOMPUTED: Final = Recomputed()


@dataclass(frozen=True)
class RangeRun:
    """How one range of a job's shards went."""

    start: int
    stop: int
    forward_s: float
    replay_s: float
    devices_lost: int
    retained: int  # shards whose graphs were kept for the replay, or are for that of a later job
    rerun_difference: float  # largest |z' − z| / max |z| of a shard between two devices


@dataclass(frozen=True, kw_only=True)
class CotangentGradient:
    """dL/dθ for given cotangents of all shards, and how the replay went.

    `unreached` names gradients that are zeros because no path leads from the loss to the parameter.
    `replay_difference` is the largest |z' − z| over a shard, relative to that shard's largest |z|.
    """

    grads: dict[str, Tensor]
    unreached: tuple[str, ...]
    retained: int  # shards whose graph was kept from the first pass
    replayed: int  # shards that were run a second time; the others had a cotangent of zero
    replay_difference: float
    seconds: dict[Phase, float]
    ranges: tuple[RangeRun, ...]
    recomputed: Recomputed = NOT_RECOMPUTED
    input_grads: dict[str, dict[str, tuple[Tensor, ...]]] | None = None
    """By group and argument name: one tensor per shard."""


@dataclass(frozen=True, kw_only=True)
class SetGradient(CotangentGradient):
    """dL/dθ and how it was computed.

    `buffers` are the model's buffers advanced once per shard.
    """

    loss: float
    shards: dict[str, int]  # shards of each group
    buffers: dict[str, Tensor] | None = None
    outputs: dict[str, Z] | None = None  # by group, in the order in which the loss saw them
    cotangents: dict[str, Z] | None = None  # likewise


@dataclass(frozen=True, kw_only=True)
class MixedResult:
    """dt/dy and how it was computed.

    `grads` are in float32 or wider, under the names that the objectives gave their parameters;
    `unreached` names those that are zeros because no path leads to them. `fallbacks` counts, by
    the operation that was in the way, the shards whose tangent was not taken by forward mode.
    """

    value: float  # t
    grads: dict[str, Tensor]
    unreached: tuple[str, ...]
    shards: dict[str, int]  # shards of the group
    tangents: int  # shards that had a tangent pass; for the others ∂t/∂dfdz is zero
    fallbacks: dict[str, int]
    replay_difference: float
    seconds: dict[Phase, float]
    ranges: tuple[RangeRun, ...]
    recomputed: Recomputed = NOT_RECOMPUTED
    dfdz: Tensor | None = None  # shards along dim 0, in the order in which `outer` saw them


@dataclass(frozen=True, kw_only=True)
class CurvatureResult:
    """Products with a curvature matrix, or with its inverse, and how they were computed.

    `products` have a row for each vector: name → (V, *shape). Of an inverse there are, by vector,
    the `iterations` and the `residuals` ‖v − (C + λI) x‖ / ‖v‖, each of a product made for it.
    """

    loss: float
    products: dict[str, Tensor]
    replay_difference: float
    seconds: dict[Phase, float]
    iterations: tuple[int, ...] = ()
    residuals: tuple[float, ...] = ()


class Observer(Protocol):
    """Told how far a job has come; may raise to stop it, which leaves the model as it was."""

    def step(self, phase: Phase, done: int, total: int) -> None:
        """Called before each shard, and once more when a phase ends."""


class Silent:
    """An observer that does nothing."""

    def step(self, phase: Phase, done: int, total: int) -> None:
        """Do nothing."""
