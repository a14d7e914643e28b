"""`MixedGradient`: a derivative of derivatives through a registered model, see docs/mixed.md."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from gradbox.computations.computation import Computation, Submission, checked, listed
from gradbox.computations.functions import split_tensors_and_scalars, traced
from gradbox.errors import InvalidInputs
from gradbox.inputs.uploads import KnownTensors, Uploads
from gradbox.protocol import MixedGradientSpec, TensorRef, TracedFunction
from gradbox.protocol.spec import MixedReturned
from gradbox.protocol.spec_fields import Scalar
from gradbox.tensors.tensor_bytes import TensorBytes, tensor_bytes

if TYPE_CHECKING:
    import torch

OUTPUT = "v"


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class MixedGradient(Computation):
    """dt/dy for t = outer(dfdz, **x), dfdz the shards' ∂inner(y, G(zᵢ))/∂zᵢ one after the other.

    G is the model; its parameters do not change and have no gradient here.

    The arguments that all computations share (inputs, mode, seed, weights, …) are described at
    `gradbox.computations.Computation`.

    Args:
        inner: a function of the members of y by name and of `v`, the model's output; or an
            nn.Module of v alone, a critic, whose parameters then are y. It returns a scalar and is
            traced.
        outer: a function of dfdz, then of the members of x by name, and of those members of y that
            it has as arguments. It returns the scalar t and is traced.
        y: tensors, and plain numbers that stay as they are. Every floating-point tensor has a
            gradient, under `y.NAME`; parameters of a module come back as `inner.NAME`.
        x: what else `outer` reads, held constant.
        z: the argument of the model that is z; by default its first floating-point one.
        returns: what the result holds, of "grads" and "dfdz" (as `result.dfdz`).

    Raises:
        InvalidInputs: the inputs are empty, are not tensors, or do not fit each other.
    """

    inner: Callable[..., Any] | torch.nn.Module
    outer: Callable[..., Any] | torch.nn.Module
    y: Mapping[str, Any] = field(default_factory=dict)
    x: Mapping[str, Any] = field(default_factory=dict)
    z: str | None = None
    returns: Sequence[MixedReturned] = ("grads",)

    def prepare(self, known: KnownTensors | None = None) -> Submission:
        uploads = Uploads(known)
        y, y_options = split_tensors_and_scalars(self.y, what="y")
        x, x_options = split_tensors_and_scalars(self.x, what="x")
        both = sorted(self.y.keys() & self.x.keys())
        if both:
            raise InvalidInputs(f"x: expected other names than those in y, got {both} in both")
        fields = self.shared_fields(uploads) | {
            "computation": "mixed_gradient",
            "inner": self._traced_inner(list(y), y_options, uploads),
            "outer": self._traced_outer(y, y_options, list(x), x_options, uploads),
            "y": _referred(y, uploads, what="y", trainable=True),
            "x": _referred(x, uploads, what="x", trainable=False),
            "z": self.z or self._first_floating(),
            "returns": listed(self.returns),
        }
        return Submission.of(checked(MixedGradientSpec, **fields), uploads)

    def _first_floating(self) -> str | None:
        """Return the first floating-point argument as it was given: a blob keeps no order."""
        shard = self.groups[0].shards[0]
        return next((name for name, tensor in shard.items() if tensor.is_floating), None)

    def _traced_inner(
        self, y: list[str], options: dict[str, Scalar], uploads: Uploads
    ) -> TracedFunction:
        by_name = OUTPUT in _parameters(self.inner)
        return traced(
            self.inner,
            uploads,
            what="inner",
            positional=0 if by_name else 1,
            arguments=[*y, OUTPUT] if by_name else y,
            options=options,
        )

    def _traced_outer(
        self,
        y: Collection[str],
        y_options: dict[str, Scalar],
        x: list[str],
        x_options: dict[str, Scalar],
        uploads: Uploads,
    ) -> TracedFunction:
        read = _parameters(self.outer)[1:]
        return traced(
            self.outer,
            uploads,
            what="outer",
            positional=1,
            arguments=[*x, *(name for name in y if name in read)],
            options=x_options | {n: value for n, value in y_options.items() if n in read},
        )


def _parameters(function: Any) -> list[str]:
    """Return the names of a function's own parameters; none where they cannot be told."""
    target = getattr(function, "forward", function)
    try:
        return list(inspect.signature(target).parameters)
    except (TypeError, ValueError):
        return []


def _referred(
    given: Mapping[str, Any], uploads: Uploads, *, what: str, trainable: bool
) -> dict[str, TensorRef]:
    read: dict[str, TensorBytes] = {
        name: tensor_bytes(value, where=f"{what}[{name!r}]") for name, value in given.items()
    }
    return {
        name: ref.model_copy(update={"requires_grad": trainable and read[name].is_floating})
        for name, ref in uploads.tensors(read).items()
    }
