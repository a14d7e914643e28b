"""`Forward`, the outputs alone, and `Gradient`, a loss over them, differentiated.

A loss is a function, an nn.Module, a `Builtin` or `Cotangents`; a `Penalty` is a term beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields
from typing import TYPE_CHECKING, Any, ClassVar, Final, TypeAlias

from gradbox.builtin_losses.signatures import check_builtin
from gradbox.computations.computation import (
    Differentiated,
    Posted,
    Submission,
    checked,
    globs,
    listed,
)
from gradbox.computations.functions import (
    split_tensors_and_scalars,
    traced,
    uploaded,
)
from gradbox.errors import InvalidInputs, InvalidJob
from gradbox.inputs.shards import UNNAMED
from gradbox.inputs.uploads import KnownTensors, Uploads
from gradbox.protocol import (
    BuiltinLoss,
    CotangentGradientSpec,
    CotangentsLoss,
    ForwardSpec,
    GradientSpec,
    GraphLoss,
    PenaltySpec,
    RunOptions,
    TracedFunction,
    option_names,
    options_of,
)
from gradbox.protocol.options import Retain
from gradbox.protocol.spec import ForwardReturned, Returned
from gradbox.protocol.spec_fields import JOB_ID, Scalar
from gradbox.tensors.tensor_bytes import is_tensor

if TYPE_CHECKING:
    import torch

    from gradbox.job import Job
    from gradbox.results.result import GradResult


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


@dataclass(frozen=True, kw_only=True, eq=False)
class Penalty:
    """A term Σᵢ weight · loss(tapᵢ) added to L, tapᵢ being an intermediate activation of shard i.

    Its graph is gone before the next layer runs, so many penalties take no more memory than one.

    Args:
        at: a submodule by one of its names, whose output is the tap, or an element of that output:
            `encoder.layer.3`, `encoder.layer.3[0]`, `encoder[last_hidden_state]`, `lstm[1][0]`. One
            that a shard goes through several times is tapped each time.
        loss: tap → scalar, traced as every loss is. Parameters of its own are held constant.
        weight: the factor before it.
        per_sample_scale: a function of the shard's final outputs z that gives one number a sample,
            (b,); sample b's gradient of the penalty is multiplied by it on its way back. It is held
            constant, and the value of L does not contain it.
    """

    at: str
    loss: Callable[..., Any] | torch.nn.Module
    weight: float = 1.0
    per_sample_scale: Callable[..., Any] | None = None

    def spec(self, uploads: Uploads) -> PenaltySpec:
        """Trace the functions and return the penalty as it is posted."""
        what = f"penalty at {self.at!r}"
        scale = None
        if self.per_sample_scale is not None:
            scale = traced(
                self.per_sample_scale, uploads, what=f"{what}: per_sample_scale", positional=1
            )
        loss = traced(self.loss, uploads, what=what, positional=1)
        return checked(
            PenaltySpec,
            where=what,
            at=self.at,
            loss=loss,
            weight=self.weight,
            per_sample_scale=scale,
        )


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Forward(Differentiated):
    """Z, the outputs of all shards, in the dtype in which the model gives them.

        Z = client.run(Forward(model="minilm", inputs=shards, readout=pool)).outputs["z"]

    The arguments that all computations share (inputs, mode, seed, weights, …) are described at
    `gradbox.computations.Computation`.

    Args:
        retain: memory in bytes for graphs that wait on the box for a `Gradient` at `Cotangents` of
            Z, or "auto": what is free. Such a gradient then needs no replay, if it comes within a
            minute, with the same `wrt`, and before the worker starts another job.
        wrt: what such a gradient will differentiate, as `Gradient` takes it.
        returns: what the result holds, of "outputs" and "buffers".

    Raises:
        InvalidInputs: the inputs are empty, are not tensors, or do not fit each other.
    """

    retain: Retain = 0
    returns: Sequence[ForwardReturned] = ("outputs",)

    def prepare(self, known: KnownTensors | None = None) -> Submission:
        uploads = Uploads(known)
        fields = self.shared_fields(uploads)
        spec = checked(ForwardSpec, computation="forward", returns=listed(self.returns), **fields)
        return Submission.of(spec, uploads)


BESIDE_COTANGENTS: Final = option_names(RunOptions) | {"loss", "wrt", "returns"}

Loss: TypeAlias = "Callable[..., Any] | torch.nn.Module | Builtin | Cotangents"


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class WithLoss(Differentiated):
    """The arguments of computations with a loss over all shards, which `Gradient` describes."""

    loss: Loss
    loss_inputs: Mapping[str, Any] = field(default_factory=dict)

    def loss_fields(self, uploads: Uploads) -> dict[str, Any]:
        """Trace the loss and return the fields of a spec that has one over all shards."""
        tensors, scalars = split_tensors_and_scalars(self.loss_inputs, what="loss_inputs")
        if isinstance(self.loss, Builtin):
            loss: BuiltinLoss | GraphLoss = self._builtin_loss(self.loss, list(tensors), scalars)
        else:
            loss = GraphLoss(function=self._traced_loss(list(tensors), scalars, uploads))
        inputs = uploaded(tensors, uploads, where="loss_inputs")
        return self.shared_fields(uploads) | {"loss": loss, "loss_inputs": inputs}

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


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Gradient(WithLoss):
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

    beside_cotangents: ClassVar = BESIDE_COTANGENTS
    model: str = ""
    inputs: Any = None
    penalties: Sequence[Penalty] = ()
    returns: Sequence[Returned] = ("grads",)

    def __post_init__(self) -> None:
        if not isinstance(self.loss, Cotangents):
            super().__post_init__()
            return
        given = [
            field.name
            for field in fields(self)
            if field.name not in self.beside_cotangents and not _is_default(self, field)
        ]
        if given:
            raise InvalidJob(
                f"{', '.join(given)}: expected none of these beside Cotangents, which belong to "
                f"job {self.loss.forward!r} that has them; leave them out"
            )

    def __repr__(self) -> str:
        if isinstance(self.loss, Cotangents):
            return f"Gradient(loss={self.loss!r})"
        return super().__repr__()

    def prepare(self, known: KnownTensors | None = None) -> Submission:
        uploads = Uploads(known)
        if isinstance(self.loss, Cotangents):
            fields = {"wrt": globs(self.wrt), **self.cotangent_fields(self.loss, uploads)}
            spec: Posted = checked(CotangentGradientSpec, computation="gradient", **fields)
        else:
            spec = checked(GradientSpec, computation="gradient", **self.spec_fields(uploads))
        return Submission.of(spec, uploads)

    def spec_fields(self, uploads: Uploads) -> dict[str, Any]:
        """Trace the functions and return the fields of a spec that has a loss over all shards."""
        return self.loss_fields(uploads) | {
            "penalties": [penalty.spec(uploads) for penalty in _penalties(self.penalties)],
            "returns": listed(self.returns),
        }

    def cotangent_fields(self, loss: Cotangents, uploads: Uploads) -> dict[str, Any]:
        """Return the fields of a spec whose loss is cotangents."""
        options = options_of(self, RunOptions)
        return options | {"loss": loss.spec(uploads), "returns": listed(self.returns)}


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
