"""The two kinds of loss that are no function."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from gradbox.inputs.uploads import Uploads
from gradbox.protocol import CotangentsLoss
from gradbox.protocol.spec_fields import Scalar
from gradbox.tensors.tensor_bytes import is_tensor, tensor_bytes

if TYPE_CHECKING:
    from gradbox.job import Job
    from gradbox.results.result import GradResult

SOLE_GROUP = "z"


class Builtin:
    """A loss that is part of gradbox: `Builtin("info_nce", temperature=0.05)`.

    `gradbox.losses` lists them; they need no torch on this side.
    """

    def __init__(self, name: str, /, **options: Scalar) -> None:
        self.name = name
        self.options = options

    def __repr__(self) -> str:
        options = "".join(f", {name}={value!r}" for name, value in self.options.items())
        return f"Builtin({self.name!r}{options})"


def job_id_of(of: Job | GradResult | str) -> str:
    """Return the id of a job, of a result's job, or the id that it is."""
    if isinstance(of, str):
        return of
    return of.manifest.job if hasattr(of, "manifest") else of.id


class Cotangents:
    """∂L/∂Z of a loss that was computed here, at the outputs of a `Forward` job that is done.

    Args:
        tensors: as that job's `result.outputs` are named and shaped: {GROUP: tensor}, or
            {"GROUP/NAME": tensor} where the readout gave several; a bare tensor for one unnamed
            group. What is left out is zero.
        of: the forward job, its result or its id.
    """

    def __init__(self, tensors: Any, *, of: Job | GradResult | str) -> None:
        self.tensors: Mapping[str, Any] = (
            {SOLE_GROUP: tensors} if is_tensor(tensors) else dict(tensors)
        )
        self.forward = job_id_of(of)

    def __repr__(self) -> str:
        return f"Cotangents({', '.join(self.tensors)}, of={self.forward!r})"

    def spec(self, uploads: Uploads) -> CotangentsLoss:
        """Upload the tensors and return the loss as it is posted.

        Raises:
            InvalidInputs: one of them is no tensor.
        """
        read = {
            name: tensor_bytes(t, where=f"cotangent {name!r}") for name, t in self.tensors.items()
        }
        return CotangentsLoss(forward=self.forward, tensors=uploads.tensors(read))
