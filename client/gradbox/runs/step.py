"""A step of a run: what is posted, and what comes back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Literal

from gradbox.computations import Gradient
from gradbox.computations.computation import Posted, Submission, checked
from gradbox.computations.gradient import BESIDE_COTANGENTS, Cotangents, Penalty
from gradbox.errors import InvalidJob, ProtocolError
from gradbox.inputs.uploads import KnownTensors, Uploads
from gradbox.protocol import CotangentStepSpec, RunKeywords, RunView, StepSpec, step_seed
from gradbox.protocol.options import Retain
from gradbox.protocol.spec import Returned, Update
from gradbox.results.result import GradResult
from gradbox.tensors.tensor_bytes import Tensor

Rates = float | Sequence[float]
OF_THE_UPDATE: Final = Update.model_fields.keys() - {"computation"}
# Arguments of `Gradient` that a step has from its run.
OF_THE_RUN: Final = ("model", "wrt", "mode", "precision", "seed", "weights")


class StepKeywords(RunKeywords, total=False):
    """The arguments of `Gradient` that `run.step` takes beside inputs and loss."""

    loss_inputs: Mapping[str, Any]
    penalties: Sequence[Penalty]
    returns: Sequence[Returned]
    readout: Callable[..., Any] | None
    method: str | Mapping[str, str]
    order: Tensor | Mapping[str, Tensor] | None
    output: str | int | None
    streams: Literal["shard", "sample"]
    recompute: str
    retain: Retain


@dataclass(frozen=True, kw_only=True, eq=False)
class StepGradient(Gradient):
    """A gradient at a run's weights, by which the run's optimizer then updates them.

    What it sends is the same whenever and wherever the same step is prepared, for the box knows a
    step that is posted again by its content. So what the client has sent before plays no part in
    it: a large tensor is a blob of its own, named by its numbers.
    """

    beside_cotangents: ClassVar = BESIDE_COTANGENTS | OF_THE_UPDATE
    run: str
    number: int
    lr: Rates | None = None
    clip_norm: float | None = None
    clip_value: float | None = None
    returns: Sequence[Returned] = ()

    @classmethod
    def of(cls, view: RunView, number: int, **given: Any) -> StepGradient:
        """Return a step of a run, which says what model, parameters, mode and seed it has.

        Raises:
            InvalidJob: an argument is one that the run says.
        """
        for name in OF_THE_RUN:
            if name in given:
                raise InvalidJob(
                    f"{name}: expected none in a step, since it is its run's; leave it out, or "
                    f"begin another run by client.train"
                )
        if isinstance(given.get("loss"), Cotangents):
            return cls(run=view.id, number=number, **given)
        return cls(
            run=view.id,
            number=number,
            model=f"{view.model}@{view.model_version}",
            wrt=view.wrt,
            mode=view.mode,  # type: ignore[arg-type]  # the spec refuses another
            precision=view.precision,  # type: ignore[arg-type]
            seed=step_seed(view.seed, number),
            **given,
        )

    def prepare(self, known: KnownTensors | None = None) -> Submission:
        uploads = Uploads(KnownTensors())
        update = {"computation": "step", **{name: getattr(self, name) for name in OF_THE_UPDATE}}
        if isinstance(self.loss, Cotangents):
            given = self.cotangent_fields(self.loss, uploads)
            spec: Posted = checked(CotangentStepSpec, **update, **given)
        else:
            spec = checked(StepSpec, **update, **self.spec_fields(uploads))
        return Submission.of(spec, uploads, path=f"/v1/runs/{self.run}/steps/{self.number}")


class TrainStep(GradResult):
    """A step that a run has made: a `GradResult`, whose tensors are what `returns` asked for.

    Attributes:
        number: which step of the run it is, 1 for the first.
        grad_norm: ‖dL/dθ‖₂ over all that is trained, before `clip_norm`.
        lr: the rates of the optimizer's groups, and of the rest.
        loss: the value of the loss; of `run.apply` there is none, for it was computed here.
        manifest: the receipt.
    """

    def __init__(self, result: GradResult) -> None:
        super().__init__(result._file)
        receipt = self.manifest
        if receipt.step is None or receipt.grad_norm is None or receipt.lr is None:
            raise ProtocolError(
                f"expected the result of a step, got that of a {receipt.computation}; is this "
                f"client older or newer than the box?"
            )
        self.number, self.grad_norm, self.lr = receipt.step, receipt.grad_norm, receipt.lr

    def __repr__(self) -> str:
        loss = "" if self.manifest.loss is None else f" loss {self.manifest.loss:g},"
        return f"<TrainStep {self.number}:{loss} gradient norm {self.grad_norm:g}>"
