"""Jobs whose result has an entry for every sample: per-sample gradients and Jacobians."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal, Self

from pydantic import Field, ValidationInfo, field_validator, model_validator
from pydantic_core import PydanticCustomError

from gradbox.graphs.wire_form import NUMBER, Entries, Items
from gradbox.protocol.spec_fields import (
    ConstantRef,
    GraphLoss,
    Identifier,
    InputGroup,
    JobId,
    Scalar,
    SharedSpec,
    TensorName,
    TensorRef,
)

Form = Literal["dense", "factored", "auto"]
GradientReduction = Literal["none", "norm", "gram", "clipped_sum", "projection"]
JacobianReduction = Literal["none", "norm", "gram", "gram_trace", "vjp", "jvp", "projection"]
ProjectionKind = Literal["sketch", "rademacher", "gaussian", "per_layer"]
Check = Literal["coupling", "self"]

# By field the reductions that read it; beside others it is left out.
READ_BY: Final[Mapping[str, tuple[str, ...]]] = {
    "dim": ("projection",),
    "kind": ("projection",),
    "clip": ("clipped_sum",),
    "vectors": ("vjp", "jvp"),
    "against": ("gram", "gram_trace", "vjp"),
    "against_group": ("gram", "gram_trace", "vjp"),
}

# A projection holds so many numbers for each row; beyond, the rows themselves are smaller.
MAX_DIM = 2**24

# Fields of other computations, and why these have none.
MEANINGLESS = {
    "penalties": "a penalty has no per-sample gradient of its own; add the term to the loss",
    "retain": "every shard runs once, so no graph is kept",
    "returns": "reduce says what comes back",
}


class SampleSpec(SharedSpec, frozen=True):
    """The fields of both.

    `form` says how an unreduced result is stored. `dim` is the length of a projection, which the
    job's seed names. `unchecked` leaves out checks: that no sample sees another ("coupling"), and
    that the first use of a plan gives autograd's gradient ("self"). `kind` is the matrix of a
    projection. `against` is a job of the same computation that left factors J': a `gram` is then
    J J'ᵀ, and a `vjp` J' Jᵀ u. `against_group` names the one of two groups of inputs whose rows are
    J'; the job's own rows are those of the other.
    """

    streams: Literal["shard"] = "shard"
    wrt: Annotated[Items[str], Field(min_length=1)] | None = None
    unchecked: Items[Check] = []
    against: JobId | None = None
    against_group: Identifier | None = None
    kind: ProjectionKind = "sketch"

    @model_validator(mode="before")
    @classmethod
    def _refuse_what_means_nothing(cls, given: Any) -> Any:
        for name in MEANINGLESS.keys() & (given if isinstance(given, dict) else {}):
            _refuse(f"{name}: expected none in a {given.get('computation')}: {MEANINGLESS[name]}")
        return given

    @field_validator("streams", mode="before")
    @classmethod
    def _of_shards(cls, streams: Any) -> Any:
        if streams == "sample":
            _refuse(
                "expected 'shard', got 'sample': rows are made with the random numbers of whole "
                "shards; leave streams out"
            )
        return streams

    @field_validator("inputs")
    @classmethod
    def _in_order(cls, groups: list[InputGroup]) -> list[InputGroup]:
        if any(group.order is not None for group in groups):
            _refuse(
                "expected shards without an order, got one with: row b of the result belongs to "
                "sample b of the shards as they come; leave order out, and index the rows by it"
            )
        return groups

    @model_validator(mode="after")
    def _one_group_or_two(self) -> Self:
        names = [group.name for group in self.inputs]
        if self.against_group is None and len(names) > 1:
            _refuse(
                f"inputs: expected one group, or two of which against names one, got "
                f"{', '.join(names)}; submit a job for each"
            )
        if self.against_group is not None and (
            len(names) != 2 or self.against_group not in names or self.against is not None
        ):
            _refuse(
                f"against_group: expected one of two groups of inputs and no against, got "
                f"{self.against_group!r} of {', '.join(names)} with against={self.against!r}"
            )
        methods = {group.method for group in self.inputs}
        if len(methods) > 1:
            _refuse(f"inputs: expected one method for both groups, got {sorted(methods)}")
        return self

    @model_validator(mode="after")
    def _no_field_of_another_reduction(self) -> Self:
        reduce = getattr(self, "reduce", None)
        for name, reductions in READ_BY.items():
            field = type(self).model_fields.get(name)
            value = getattr(self, name, None)
            if field is not None and value != field.default and reduce not in reductions:
                got = repr(value) if isinstance(value, str | int | float) else "some"
                _refuse(
                    f"{name.removesuffix('_group')}: expected none with reduce={reduce!r}, got "
                    f"{got}; it belongs to {', '.join(map(repr, reductions))}"
                )
        return self

    @model_validator(mode="after")
    def _dim_of_a_projection(self) -> Self:
        dim = getattr(self, "dim", None)
        if getattr(self, "reduce", None) == "projection" and (dim is None or dim < 1):
            _refuse(f"dim: expected a whole number from 1 with reduce='projection', got {dim!r}")
        return self

    @model_validator(mode="after")
    def _transfer_of_gradients(self) -> Self:
        reduce, form = getattr(self, "reduce", None), getattr(self, "form", None)
        if self.transfer == "exact":
            return self
        if form != "dense":
            _refuse(
                f"transfer: expected 'exact' with form={form!r}, got {self.transfer!r}: a product "
                f"of rounded factors is off by more than one rounding; take form='dense'"
            )
        if reduce not in ("none", "clipped_sum", "vjp") or self.against or self.against_group:
            _refuse(
                f"transfer: expected 'exact' with reduce={reduce!r}, got {self.transfer!r}: its "
                f"result holds no gradients, which are all that is rounded"
            )
        return self

    @field_validator("form", check_fields=False)
    @classmethod
    def _factors_are_kept_or_used_up(cls, form: Form, info: ValidationInfo) -> Form:
        reduce = info.data.get("reduce", "none")
        if form != "dense" and reduce != "none":
            _refuse(
                f"expected 'dense' with reduce={reduce!r}, got {form!r}; leave form away, or "
                f"take the factors and reduce them where they are"
            )
        return form


class PerSampleGradientSpec(SampleSpec, frozen=True):
    """dℓ_b/dθ of every sample b, ℓ = loss(z, **loss_inputs) of shape (B,).

    For the shards of `against_group`, the loss reads `against_loss_inputs` in place of what
    `loss_inputs` has of the same names.
    """

    computation: Literal["per_sample_gradient"]
    loss: GraphLoss
    loss_inputs: Entries[Identifier, TensorRef | Scalar] = {}
    against_loss_inputs: Entries[Identifier, TensorRef] = {}
    reduce: GradientReduction = "none"
    form: Form = "dense"
    clip: Annotated[float | None, NUMBER] = None
    dim: Annotated[int | None, Field(le=MAX_DIM, strict=True)] = None

    @model_validator(mode="after")
    def _loss_inputs_of_both(self) -> Self:
        unknown = sorted(self.against_loss_inputs.keys() - self.loss_inputs.keys())
        if unknown or (self.against_loss_inputs and self.against_group is None):
            _refuse(
                f"against_loss_inputs: expected names of loss_inputs, with an against_group, got "
                f"{unknown or sorted(self.against_loss_inputs)}"
            )
        return self

    @model_validator(mode="after")
    def _clip_of_a_clipped_sum(self) -> Self:
        if self.reduce == "clipped_sum" and (self.clip is None or not self.clip > 0):
            _refuse(f"clip: expected a positive number with reduce='clipped_sum', got {self.clip}")
        return self


class JacobianSpec(SampleSpec, frozen=True):
    """dz_by/dθ of every sample b and output y.

    `vectors` are cotangents of z's shape for `vjp`, and a tangent by parameter name for `jvp`.
    """

    computation: Literal["jacobian"]
    reduce: JacobianReduction = "none"
    form: Form = "dense"
    vectors: ConstantRef | Entries[TensorName, ConstantRef] | None = None
    dim: Annotated[int | None, Field(le=MAX_DIM, strict=True)] = None

    @model_validator(mode="after")
    def _vectors_of_a_product(self) -> Self:
        if self.reduce == "vjp" and not isinstance(self.vectors, TensorRef):
            _refuse("vectors: expected one tensor, shaped like z, with reduce='vjp', got another")
        if self.reduce == "jvp" and not (isinstance(self.vectors, dict) and self.vectors):
            _refuse("vectors: expected {parameter: tangent} with reduce='jvp', got another")
        return self


def _refuse(why: str) -> None:
    raise PydanticCustomError("per_sample", "{why}", {"why": why})
