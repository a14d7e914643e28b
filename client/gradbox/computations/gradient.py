"""`Gradient`: a loss over all shards, differentiated by what the model holds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from gradbox.arguments import explain_arguments
from gradbox.builtin_losses.signatures import check_builtin
from gradbox.computations.computation import Differentiated, Submission, checked, globs, listed
from gradbox.computations.function_inputs import split_tensors_and_scalars, uploaded
from gradbox.computations.loss_kinds import Builtin, Cotangents
from gradbox.computations.penalty import Penalty
from gradbox.computations.traced_function import check_derivative, traced
from gradbox.errors import InvalidInputs, InvalidJob
from gradbox.inputs.known_tensors import KnownTensors
from gradbox.inputs.uploads import Uploads
from gradbox.protocol import (
    BuiltinLoss,
    CotangentGradientSpec,
    GradientSpec,
    GraphLoss,
    RunOptions,
    TracedFunction,
    option_names,
    options_of,
)
from gradbox.protocol.spec import Returned
from gradbox.protocol.spec_fields import Scalar

if TYPE_CHECKING:
    import torch

BESIDE_COTANGENTS: Final = option_names(RunOptions) | {"loss", "wrt", "returns"}

Loss: TypeAlias = "Callable[..., Any] | torch.nn.Module | Builtin | Cotangents"


@explain_arguments
@dataclass(frozen=True, kw_only=True, eq=False)
class Gradient(Differentiated):
    """dL/dθ of L = loss(Z, **loss_inputs), Z being the outputs of all shards.

        Gradient(model="minilm", inputs=shards, loss=contrastive, loss_inputs={"labels": labels})

    The arguments that all computations share (inputs, mode, seed, weights, …) are described at
    `gradbox.computations.Computation`.

    Args:
        loss: a function, an nn.Module, a `Builtin` or `Cotangents`. With one unnamed group it is
            called as loss(Z, **loss_inputs); with named groups each Z goes by its group's name. It
            is traced to a graph of allowed operations and returns a scalar; the value is exactly
            that.
            Beside `Cotangents` only wrt, returns ("grads", "input_grads"), transfer, priority,
            timeout_s, devices and name can be given: model, inputs and the rest are those of the
            forward job.
        loss_inputs: what else the loss reads: tensors, or plain numbers, strings and booleans.
            Where a tensor requires grad, its gradient comes back as `loss_inputs.NAME`; the
            parameters of a loss module come back as `loss.NAME`.
        penalties: terms on intermediate activations.
        returns: what the result holds, of "grads", "buffers", "outputs" (Z), "cotangents" (∂L/∂Z)
            and "input_grads".

    Raises:
        InvalidInputs: the inputs are empty, are not tensors, or do not fit each other.
        InvalidJob: an argument is given that cannot be beside `Cotangents`.
    """

    model: str = ""
    inputs: Any = None
    loss: Loss
    loss_inputs: Mapping[str, Any] = field(default_factory=dict)
    penalties: Sequence[Penalty] = ()
    returns: Sequence[Returned] = ("grads",)

    def __post_init__(self) -> None:
        if not isinstance(self.loss, Cotangents):
            super().__post_init__()
            return
        given = [
            field.name
            for field in fields(self)
            if field.name not in BESIDE_COTANGENTS and not _is_default(self, field)
        ]
        if given:
            raise InvalidJob(
                f"{', '.join(given)}: expected none of these beside Cotangents, which belong to "
                f"job {self.loss.forward!r} that has them; leave them out"
            )

    def __repr__(self) -> str:
        if isinstance(self.loss, Cotangents):
            return f"Gradient(loss={self.loss!r})"
        shards = " + ".join(f"{len(group.shards)} {group.name}" for group in self.groups)
        return f"Gradient(model={self.model!r}, shards={shards}, loss={self.loss!r})"

    def prepare(self, known: KnownTensors | None = None) -> Submission:
        uploads = Uploads(known)
        if isinstance(self.loss, Cotangents):
            return self._at_cotangents(self.loss, uploads)
        tensors, scalars = split_tensors_and_scalars(self.loss_inputs, what="loss_inputs")
        if isinstance(self.loss, Builtin):
            loss: BuiltinLoss | GraphLoss = self._builtin_loss(self.loss, list(tensors), scalars)
        else:
            loss = GraphLoss(function=self._traced_loss(list(tensors), scalars, uploads))
        inputs = uploaded(tensors, uploads, where="loss_inputs")
        if isinstance(loss, GraphLoss) and not self.penalties:
            check_derivative(loss.function, inputs)
        given = self.shared_fields(uploads) | {
            "computation": "gradient",
            "loss": loss,
            "loss_inputs": inputs,
            "penalties": [penalty.spec(uploads) for penalty in _penalties(self.penalties)],
            "returns": listed(self.returns),
        }
        return Submission.of(checked(GradientSpec, **given), uploads)

    def _at_cotangents(self, loss: Cotangents, uploads: Uploads) -> Submission:
        spec = checked(
            CotangentGradientSpec,
            computation="gradient",
            loss=loss.spec(uploads),
            wrt=globs(self.wrt),
            returns=listed(self.returns),
            **options_of(self, RunOptions),
        )
        return Submission.of(spec, uploads)

    def _builtin_loss(
        self, loss: Builtin, tensors: list[str], scalars: dict[str, Scalar]
    ) -> BuiltinLoss:
        twice = sorted(set(loss.options) & set(scalars))
        if twice:
            raise InvalidJob(f"loss: expected each option once, got {twice} in loss_inputs as well")
        options = {**loss.options, **scalars}
        groups = [group.name for group in self.groups]
        check_builtin(loss.name, options, groups=groups, inputs=tensors)
        return BuiltinLoss(name=loss.name, options=options)

    def _traced_loss(
        self, tensors: list[str], scalars: dict[str, Scalar], uploads: Uploads
    ) -> TracedFunction:
        names = [group.name for group in self.groups]
        unnamed = len(names) == 1
        both = sorted(set(names) & {*tensors, *scalars})
        if both and not unnamed:
            raise InvalidInputs(
                f"loss_inputs: expected other names than those of the groups, got {both} in both"
            )
        return traced(
            self.loss,
            uploads,
            what="loss",
            positional=1 if unnamed else 0,
            arguments=tensors if unnamed else names + tensors,
            options=scalars,
        )


def _penalties(given: Any) -> Sequence[Penalty]:
    several = isinstance(given, Sequence) and all(isinstance(term, Penalty) for term in given)
    if not several:
        raise InvalidJob(
            f"penalties: expected a list of Penalty, got {given!r:.120}; write "
            f"[Penalty(at=..., loss=...)]"
        )
    found: Sequence[Penalty] = given
    return found


def _is_default(computation: Gradient, given: Field[Any]) -> bool:
    default = given.default
    if default is MISSING and given.default_factory is not MISSING:
        default = given.default_factory()
    value = getattr(computation, given.name)
    plain = isinstance(value, str | int | float | Sequence | Mapping)
    none_given = isinstance(value, Sequence | Mapping) and not value and not default
    return value is default or none_given or (plain and bool(value == default))
