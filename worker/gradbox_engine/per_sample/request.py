"""A per-sample computation's request, checked before anything runs, and its result."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any, Literal, get_args

from torch import Tensor

from gradbox_engine.errors import BadReduction
from gradbox_engine.requests import NOT_RECOMPUTED, Recomputed
from gradbox_factors import Factored, Kind

GradientReduction = Literal["none", "norm", "gram", "clipped_sum", "projection"]
JacobianReduction = Literal["none", "norm", "gram", "gram_trace", "vjp", "jvp", "projection"]
Form = Literal["dense", "factored", "smaller", "auto"]
"""`smaller` is factors, but rows of the layers where these are smaller; `auto` is that or dense."""

RowsCompared = Literal["none", "one", "all"]
"""How many rows of a shard were compared with autograd's, those of the shard with most."""

ARGUMENTS = {
    "clip": (("clipped_sum",), "a positive number"),
    "dim": (("projection",), "a whole number from 1"),
    "vectors": (("vjp", "jvp"), "some"),
    "against": (("gram", "gram_trace", "vjp"), "rows, or none"),
}
"""The reductions that an argument belongs to, and what it is with these."""


@dataclass(frozen=True)
class OtherShards:
    """Shards whose rows a call makes first and keeps as factors, to multiply its own with.

    `loss_inputs` are what the loss reads for them, in place of the call's own of the same names;
    `streams` the numbers (k, i) of their random streams, by default 1 and the shard's.
    """

    inputs: Sequence[Mapping[str, Any]]
    loss_inputs: Mapping[str, Any] = field(default_factory=dict)
    streams: Sequence[tuple[int, int]] | None = None


@dataclass(frozen=True)
class Request:
    """What is to be done with the per-sample quantities."""

    reduce: str
    form: Form
    clip: float | None = None
    dim: int | None = None
    seed: int = 0
    vectors: Any = None
    against: Factored | OtherShards | None = None
    kind: Kind = "sketch"
    samples: int | None = None  # of the whole job, where the shards are a range of it

    def check(self, allowed: Any) -> None:
        """Refuse what does not fit together.

        Raises:
            BadReduction: an unknown reduction or form, or an argument that is missing or wrong.
        """
        known = get_args(allowed)
        if self.reduce not in known:
            raise BadReduction(f"reduce: expected one of {list(known)}, got {self.reduce!r}")
        if self.form not in get_args(Form):
            raise BadReduction(f"form: expected one of {list(get_args(Form))}, got {self.form!r}")
        if self.form != "dense" and self.reduce != "none":
            raise BadReduction(
                f"form={self.form!r} keeps factors, which reduce={self.reduce!r} does not return: "
                "leave form away, or reduce the factored result"
            )
        if self.kind not in get_args(Kind) or (
            self.kind != "sketch" and self.reduce != "projection"
        ):
            raise BadReduction(
                f"kind: expected one of {list(get_args(Kind))} with reduce='projection', got "
                f"{self.kind!r} with reduce={self.reduce!r}"
            )
        fits = {
            "clip": 0 < _number(self.clip, int | float) < inf,
            "dim": _number(self.dim, int) >= 1,
            "vectors": self.vectors is not None,
            "against": True,
        }
        for name, (reductions, expected) in ARGUMENTS.items():
            value = getattr(self, name)
            if self.reduce in reductions and not fits[name]:
                raise BadReduction(
                    f"{name}: expected {expected} with reduce={self.reduce!r}, got {value!r}"
                )
            if self.reduce not in reductions and value is not None:
                raise BadReduction(
                    f"{name}: expected none with reduce={self.reduce!r}, got "
                    f"{type(value).__name__}; it belongs to {', '.join(map(repr, reductions))}"
                )


def _number(value: Any, kind: Any) -> float:
    """Return a number of some kind, -1 for anything else."""
    return value if isinstance(value, kind) and not isinstance(value, bool) else -1


@dataclass(frozen=True)
class SampleResult:
    """Per-sample quantities, and how each parameter's were computed.

    Of a gradient the Y dim is left out everywhere. `arrays` holds what the reduction asked for:

        none         name → (B, Y, *shape), unless a sink took them or they stay factors
        norm         "norm" → (B, Y) over all parameters
        gram         "gram" → (B, Y, B, Y); gram_trace: (B, B); against rows J' (B, Y, B', Y')
        projection   "projection" → (B, Y, dim);  jvp: "jvp" → (B, Y)
        vjp          name → shape; against rows J' "jvp" → J' Jᵀ u, (B', Y')
        clipped_sum  name → shape: Σ_b g_b · min(1, clip/‖g_b‖), without noise
    """

    arrays: dict[str, Tensor]
    factors: Factored | None = None
    parameter_norms: dict[str, Tensor] = field(default_factory=dict)  # name → (B, Y)
    values: Tensor | None = None  # the losses (B,), or z (B, ...)
    other_values: Tensor | None = None  # those of other shards that the rows were multiplied with
    roads: Mapping[str, Sequence[str]] = field(default_factory=dict)  # parameter → rules and routes
    loops: Mapping[str, str] = field(
        default_factory=dict
    )  # parameter → why it took one backward a sample
    unreached: tuple[str, ...] = ()  # no path leads from the loss to these: zeros
    names: tuple[str, ...] = ()  # the parameters, in `named_parameters` order
    samples: int = 0
    outputs: int = 1
    rows_compared: RowsCompared = "none"  # on one shard
    seconds: float = 0.0
    recomputed: Recomputed = NOT_RECOMPUTED


def most_compared(found: Iterable[RowsCompared]) -> RowsCompared:
    """Return the most that was compared on a shard."""
    return max(found, key=get_args(RowsCompared).index)
