"""The two kinds of loss that are no function."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from gradbox.arguments import explain_arguments
from gradbox.errors import InvalidInputs, InvalidJob
from gradbox.inputs.shards import UNNAMED
from gradbox.inputs.uploads import Uploads
from gradbox.protocol import CotangentsLoss
from gradbox.protocol.spec_fields import Scalar
from gradbox.tensors.tensor_bytes import is_tensor

if TYPE_CHECKING:
    from gradbox.job import Job
    from gradbox.results.result import GradResult

JOB_ID: Final = re.compile(r"[A-Za-z0-9_-]{1,100}")


@explain_arguments
class Builtin:
    """A loss that is part of gradbox: `Builtin("info_nce", temperature=0.05)`.

    `gradbox.losses` lists them, with their options. To submit a job with one needs no torch here.
    """

    def __init__(self, name: str, /, **options: Scalar) -> None:
        self.name = name
        self.options = options

    def __repr__(self) -> str:
        options = "".join(f", {name}={value!r}" for name, value in self.options.items())
        return f"Builtin({self.name!r}{options})"


def job_id_of(of: Job | GradResult | str) -> str:
    """Return the id of a job, of a result's job, or the id that it is.

    Raises:
        InvalidJob: it is none of these.
    """
    found = of.manifest.job if hasattr(of, "manifest") else getattr(of, "id", of)
    if not isinstance(found, str) or JOB_ID.fullmatch(found) is None:
        raise InvalidJob(f"expected a job, its result or its id, got {of!r:.120}")
    return found


@explain_arguments
class Cotangents:
    """∂L/∂Z of a loss that was computed here, at the outputs of a `Forward` job that is done.

        forward = client.run(Forward(model="minilm", inputs=shards, readout=pool))
        Z = forward.outputs["z"].clone().requires_grad_()
        any_python(Z).backward()
        result = client.run(Gradient(loss=Cotangents(Z.grad, of=forward)))

    Args:
        tensors: as that job's `result.outputs` are named and shaped: {GROUP: tensor}, or
            {"GROUP/NAME": tensor} where the readout gave several; a bare tensor for one unnamed
            group. What is left out is zero.
        of: the forward job, its result or its id.

    Raises:
        InvalidInputs: `tensors` is neither a tensor nor a dict with one or more.
        InvalidJob: `of` is no job.
    """

    def __init__(self, tensors: Any, *, of: Job | GradResult | str) -> None:
        if not is_tensor(tensors) and not (isinstance(tensors, Mapping) and tensors):
            raise InvalidInputs(
                f"cotangents: expected a tensor or {{group: tensor}} with one or more, got "
                f"{'an empty dict' if tensors == {} else type(tensors).__name__}"
            )
        self.tensors: Mapping[str, Any] = (
            {UNNAMED: tensors} if is_tensor(tensors) else dict(tensors)
        )
        self.forward = job_id_of(of)

    def __repr__(self) -> str:
        return f"Cotangents({', '.join(self.tensors)}, of={self.forward!r})"

    def spec(self, uploads: Uploads) -> CotangentsLoss:
        """Upload the tensors and return the loss as it is posted.

        Raises:
            InvalidInputs: one of them is no tensor.
        """
        refs = uploads.named(self.tensors, where="cotangents")
        return CotangentsLoss(forward=self.forward, tensors=refs)
