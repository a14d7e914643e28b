"""`PerSampleGradient` and `Jacobian`: a row for every sample."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from gradbox.computations.computation import Computation, Submission, checked, globs, listed
from gradbox.computations.functions import (
    split_tensors_and_scalars,
    traced,
    uploaded,
)
from gradbox.computations.gradient import Builtin, job_id_of
from gradbox.errors import InvalidInputs, InvalidJob
from gradbox.inputs.uploads import KnownTensors, Uploads
from gradbox.protocol import GraphLoss, JacobianSpec, PerSampleGradientSpec, TensorRef
from gradbox.protocol.options import Transfer
from gradbox.protocol.per_sample import (
    Check,
    Form,
    GradientReduction,
    JacobianReduction,
    ProjectionKind,
)
from gradbox.tensors.tensor_bytes import Tensor, is_tensor, is_torch_importable, tensor_bytes

if TYPE_CHECKING:
    import torch

    from gradbox.job import Job
    from gradbox.results.result import GradResult


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class PerSample(Computation):
    """The arguments of both, beside those that all computations share.

    There is one group of inputs, and row b of the result belongs to sample b of its shards. There
    are two where `against` names one of them; the rows are those of the other.

    Args:
        wrt: globs over the names of parameters, and of modules, which stand for all parameters
            below them; by default every floating-point parameter.
        form: how an unreduced result is stored: "dense", "factored" (layer inputs and output
            gradients in place of their products) or "auto", whichever is smaller for each layer;
            rows are read alike. Without torch on this machine "auto" is "dense", for factors are
            multiplied out with torch, and so it is with `transfer`, which rounds rows alone.
        dim: the length of a projection, which `seed` names.
        kind: its matrix: "sketch" from factors; "per_layer", also from factors, each parameter's
            matrix to at most `dim` rows and `dim` columns; or "rademacher" (signs) and "gaussian",
            whose entries are independent and which cost more. The receipt's `projection_error`
            bounds the error of inner products.
        against: a job of the same computation, model and `wrt` that is done and kept its rows as
            factors (form="factored" or "auto"), its result or its id. A "gram" is then that of
            these rows with those, (B, B') or (B, Y, B', Y'). Or the name of one of two groups of
            inputs, whose rows are then made first.
        unchecked: checks to leave out: "coupling" (no sample's output depends on another) and
            "self" (the first rows of a plan are compared with autograd's).
    """

    wrt: str | Sequence[str] | None = None
    form: Form = "auto"
    dim: int | None = None
    kind: ProjectionKind = "sketch"
    against: Job | GradResult | str | None = None
    unchecked: Sequence[Check] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        names = [group.name for group in self.groups]
        if len(names) > 1 and self.against_group is None:
            raise InvalidInputs(
                f"inputs: expected one group, or two of which against names one, got {names}; "
                f"submit a job for each"
            )

    @property
    def against_group(self) -> str | None:
        """The group that `against` names, if it names one."""
        names = [group.name for group in self.groups]
        return self.against if len(names) > 1 and self.against in names else None

    def shared_fields(self, uploads: Uploads) -> dict[str, Any]:
        return super().shared_fields(uploads) | {
            "wrt": globs(self.wrt),
            "dim": self.dim,
            "kind": self.kind,
            "against": self._against_job(),
            "against_group": self.against_group,
            "unchecked": listed(self.unchecked),
        }

    def _against_job(self) -> str | None:
        if self.against is None or self.against_group is not None:
            return None
        return job_id_of(self.against)


def _form_on_the_wire(form: Form, *, reduce: str, transfer: Transfer) -> Form:
    """Return what the box is asked for: "auto" is "dense" where no factors can be stored."""
    has_factors = reduce == "none" and transfer == "exact" and is_torch_importable()
    return "dense" if form == "auto" and not has_factors else form


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class PerSampleGradient(PerSample):
    """dℓ_b/dθ of every sample b, ℓ = loss(z, **loss_inputs) of shape (B,).

        def loss(z, labels):
            return F.cross_entropy(z, labels, reduction="none")

        PerSampleGradient(model="digits", inputs=shards, loss=loss, loss_inputs={"labels": labels})

    The arguments that it shares with `Jacobian` (wrt, form, dim, against, …) are described at
    `gradbox.computations.per_sample.PerSample`, those of all computations (inputs, mode, seed,
    weights, …) at `gradbox.computations.Computation`.

    Args:
        loss: a function that returns one number a sample, entry b read from row b of z alone. It
            is traced, and called once for every shard.
        loss_inputs: what else the loss reads. A tensor with one row a sample, over all shards, is
            cut with them; what else there is goes whole. With two groups, {group: tensor}.
        reduce: "none" gives name → (B, *shape) as `result.grads`; "norm" and "gram" what
            `result.norms()` and `result.gram()` return; "projection" a seeded random projection to
            `dim` numbers a sample; "clipped_sum" Σ_b g_b · min(1, clip/‖g_b‖) as `result.grads`, of
            the parameters' shapes. The noise that makes it private is left to the caller.
        clip: the largest norm that `clipped_sum` lets through.

    Raises:
        InvalidInputs: the inputs are empty, are not tensors, or do not fit each other.
    """

    loss: Callable[..., Any] | torch.nn.Module
    loss_inputs: Mapping[str, Any] = field(default_factory=dict)
    reduce: GradientReduction = "none"
    clip: float | None = None

    def prepare(self, known: KnownTensors | None = None) -> Submission:
        uploads = Uploads(known)
        fields = self.spec_fields(uploads)
        return Submission.of(checked(PerSampleGradientSpec, **fields), uploads)

    def spec_fields(self, uploads: Uploads) -> dict[str, Any]:
        """Return the fields of the spec, whose tensors are among the uploads from now on."""
        if isinstance(self.loss, Builtin):
            raise InvalidJob(
                f"loss: expected a function that returns one number a sample, got {self.loss!r}, "
                f"which returns one for all; write the function without its mean or sum"
            )
        own, others = self._loss_inputs_apart()
        tensors, scalars = split_tensors_and_scalars(own, what="loss_inputs")
        function = traced(
            self.loss, uploads, what="loss", positional=1, arguments=list(tensors), options=scalars
        )
        inputs = uploaded(tensors, uploads, where="loss_inputs")
        return self.shared_fields(uploads) | {
            "computation": "per_sample_gradient",
            "loss": GraphLoss(function=function),
            "loss_inputs": inputs,
            "against_loss_inputs": uploaded(
                others, uploads, where=f"group {self.against_group!r}: loss_inputs"
            ),
            "reduce": self.reduce,
            "form": _form_on_the_wire(self.form, reduce=self.reduce, transfer=self.transfer),
            "clip": self.clip,
        }

    def _loss_inputs_apart(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return what the loss reads for the rows' group, and what in its place for the other."""
        other = self.against_group
        if other is None:
            return dict(self.loss_inputs), {}
        names = [group.name for group in self.groups]
        (mine,) = (name for name in names if name != other)
        own, others = dict(self.loss_inputs), {}
        for name, value in self.loss_inputs.items():
            if not isinstance(value, Mapping):
                continue
            if set(value) != set(names):
                raise InvalidInputs(
                    f"loss_inputs[{name!r}]: expected a tensor for each group, {names}, got "
                    f"{sorted(map(str, value))}"
                )
            own[name], others[name] = value[mine], value[other]
        return own, others


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Jacobian(PerSample):
    """dz_by/dθ of every sample b and output y, the dims of z behind the first flattened to Y.

        J = client.run(Jacobian(model="digits", inputs=shards)).grads["0.weight"]  # (B, Y, 32, 64)

    The arguments that it shares with `PerSampleGradient` (wrt, form, dim, against, …) are described
    at `gradbox.computations.per_sample.PerSample`, those of all computations (inputs, mode, seed,
    weights, …) at `gradbox.computations.Computation`.

    Args:
        reduce: "none" gives name → (B, Y, *shape) as `result.grads`; "norm", "gram", "gram_trace",
            "projection" and "jvp" what the methods of these names return; "vjp" Jᵀu as
            `result.grads`, of the parameters' shapes; with `against`, whose rows are J', J' Jᵀu
            as `result.jvp()`.
        vectors: for "vjp" a tensor shaped like z over all shards; for "jvp" {parameter: tangent},
            zero where a parameter is left out.

    Raises:
        InvalidInputs: the inputs are empty, are not tensors, or do not fit each other.
    """

    reduce: JacobianReduction = "none"
    vectors: Tensor | Mapping[str, Tensor] | None = None

    def prepare(self, known: KnownTensors | None = None) -> Submission:
        uploads = Uploads(known)
        fields = self.shared_fields(uploads) | {
            "computation": "jacobian",
            "reduce": self.reduce,
            "form": _form_on_the_wire(self.form, reduce=self.reduce, transfer=self.transfer),
            "vectors": self._uploaded_vectors(uploads),
        }
        return Submission.of(checked(JacobianSpec, **fields), uploads)

    def _uploaded_vectors(self, uploads: Uploads) -> TensorRef | dict[str, TensorRef] | None:
        if self.vectors is None:
            return None
        if is_tensor(self.vectors):
            only = uploads.tensors({"vectors": tensor_bytes(self.vectors, where="vectors")})
            return only["vectors"]
        if not isinstance(self.vectors, Mapping):
            raise InvalidInputs(
                f"vectors: expected a tensor or {{parameter: tensor}}, got "
                f"{type(self.vectors).__name__}"
            )
        return uploads.named(self.vectors, where="vectors")
