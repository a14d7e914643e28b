"""A per-sample computation's request, checked before anything runs, and its result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import Any, Literal, get_args

from torch import Tensor

from gradbox_engine.errors import BadReduction
from gradbox_factors import Factored, Kind

GradientReduction = Literal["none", "norm", "gram", "clipped_sum", "projection"]
JacobianReduction = Literal["none", "norm", "gram", "gram_trace", "vjp", "jvp", "projection"]
Form = Literal["dense", "factored", "auto"]


@dataclass(frozen=True)
class Request:
    """What is to be done with the per-sample quantities."""

    reduce: str
    form: Form
    clip: float | None = None
    dim: int | None = None
    seed: int = 0
    vectors: Any = None
    against: Factored | None = None
    kind: Kind = "sketch"

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
        self._check_argument(
            "clip", "clipped_sum", self.clip, self._is_positive(self.clip), "a positive number"
        )
        whole = isinstance(self.dim, int) and not isinstance(self.dim, bool) and self.dim >= 1
        self._check_argument("dim", "projection", self.dim, whole, "a whole number from 1")
        if self.kind not in get_args(Kind) or (
            self.kind != "sketch" and self.reduce != "projection"
        ):
            raise BadReduction(
                f"kind: expected one of {list(get_args(Kind))} with reduce='projection', got "
                f"{self.kind!r} with reduce={self.reduce!r}"
            )
        given = self.vectors is not None
        if given != (self.reduce in ("vjp", "jvp")):
            raise BadReduction(
                f"vectors: expected {'some' if not given else 'none'} with reduce={self.reduce!r}, "
                f"got {'some' if given else 'none'}"
            )

        if self.against is not None and self.reduce not in ("gram", "gram_trace", "vjp"):
            raise BadReduction(
                f"against: expected none with reduce={self.reduce!r}, got rows; they belong to "
                f"'gram', 'gram_trace' and 'vjp'"
            )

    def _check_argument(
        self, name: str, reduce: str, value: Any, fits: bool, expected: str
    ) -> None:
        if self.reduce == reduce and not fits:
            raise BadReduction(f"{name}: expected {expected} with reduce={reduce!r}, got {value!r}")
        if self.reduce != reduce and value is not None:
            raise BadReduction(
                f"{name}: expected none with reduce={self.reduce!r}, got {value!r}; it belongs to "
                f"reduce={reduce!r}"
            )

    @staticmethod
    def _is_positive(value: Any) -> bool:
        number = isinstance(value, int | float) and not isinstance(value, bool)
        return number and isfinite(value) and value > 0


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
    roads: Mapping[str, Sequence[str]] = field(default_factory=dict)  # parameter → rules and routes
    loops: Mapping[str, str] = field(
        default_factory=dict
    )  # parameter → why it took one backward a sample
    unreached: tuple[str, ...] = ()  # no path leads from the loss to these: zeros
    names: tuple[str, ...] = ()  # the parameters, in `named_parameters` order
    samples: int = 0
    outputs: int = 1
    seconds: float = 0.0
