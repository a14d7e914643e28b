"""`HessianProduct` and `InverseHessian`: second derivatives of a loss over all shards."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from gradbox.computations.computation import Submission, checked
from gradbox.computations.gradient import WithLoss
from gradbox.errors import InvalidInputs
from gradbox.inputs.uploads import KnownTensors, Uploads
from gradbox.protocol import HessianProductSpec, InverseHessianSpec
from gradbox.protocol.spec import CurvatureKind
from gradbox.tensors.lazy_tensor import LazyTensor
from gradbox.tensors.tensor_bytes import Tensor

OF_THE_INVERSE: Final = ("damping", "by", "max_iterations", "tolerance")


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class HessianProduct(WithLoss):
    """H v of V vectors, H = ∂²L/∂θ² of the L = loss(Z, **loss_inputs) that `Gradient` takes.

        HessianProduct(model="minilm", inputs=shards, loss=contrastive, vectors=rows.grads)

    `result.grads` has a row for each vector: name → (V, *shape). Loss and `loss_inputs` are as in
    `Gradient`; a loss of shape (samples,) is summed, and what it trains is held constant. The
    arguments that all computations share (inputs, mode, seed, weights, …) are described at
    `gradbox.computations.Computation`.

    Args:
        vectors: {parameter: (V, *shape)}, as the rows of a `PerSampleGradient` are; zero where a
            parameter that `wrt` selects is left out.
        kind: "hessian"; or "ggn", the generalised Gauss-Newton matrix Jᵀ ∇²loss J, J = ∂Z/∂θ.

    Raises:
        InvalidInputs: the inputs are empty, are not tensors, or do not fit each other.
    """

    vectors: Mapping[str, Tensor]
    kind: CurvatureKind = "hessian"

    def prepare(self, known: KnownTensors | None = None) -> Submission:
        uploads = Uploads(known)
        fields = {"computation": "hessian_product", **self.product_fields(uploads)}
        return Submission.of(checked(HessianProductSpec, **fields), uploads)

    def product_fields(self, uploads: Uploads) -> dict[str, Any]:
        """Return the fields of a spec that multiplies vectors."""
        if not isinstance(self.vectors, Mapping):
            raise InvalidInputs(
                f"vectors: expected {{parameter: tensor}}, got {type(self.vectors).__name__}"
            )
        # Rows of a result that came as factors are made as they are indexed.
        given = {n: x[()] if isinstance(x, LazyTensor) else x for n, x in self.vectors.items()}
        vectors = uploads.named(given, where="vectors")
        return self.loss_fields(uploads) | {"vectors": vectors, "kind": self.kind}


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class InverseHessian(HessianProduct):
    """(H + damping I)⁻¹ v of V vectors, all solved in one job.

        InverseHessian(..., vectors=rows.grads, kind="ggn", damping=1e-3)

    The arguments are those of `HessianProduct`, and these. `result.manifest` has `iterations` and
    `residuals`, ‖v − (H + damping I) x‖ / ‖v‖, by vector.

    Args:
        damping: λ, which has to be larger than the matrix bends down along any direction.
        by: "cg", conjugate gradients.
        max_iterations: steps at most; a step multiplies every vector that is not solved yet.
        tolerance: the residual at which a vector is solved.
    """

    kind: CurvatureKind = "ggn"
    damping: float
    by: Literal["cg"] = "cg"
    max_iterations: int = 100
    tolerance: float = 1e-5

    def prepare(self, known: KnownTensors | None = None) -> Submission:
        uploads = Uploads(known)
        own = {name: getattr(self, name) for name in OF_THE_INVERSE}
        fields = {"computation": "inverse_hessian", **self.product_fields(uploads), **own}
        return Submission.of(checked(InverseHessianSpec, **fields), uploads)
