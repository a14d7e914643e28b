"""Jobs whose result has an entry for every sample: per-sample gradients and Jacobians."""

from __future__ import annotations

from math import isfinite
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
ProjectionKind = Literal["sketch", "rademacher", "gaussian"]
Check = Literal["coupling", "self"]

# What the rows of another job have a part in.
AGAINST: Final = ("gram", "gram_trace", "vjp")

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
                f"inputs: expected one group of inputs, got {', '.join(names)}; submit a job for "
                f"each, or name one of two in against_group"
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
    def _against_of_products(self) -> Self:
        reduce, given = getattr(self, "reduce", None), self.against or self.against_group
        if given is not None and reduce not in AGAINST:
            _refuse(
                f"against: expected none with reduce={reduce!r}, got {given!r}; it belongs to "
                f"{', '.join(map(repr, AGAINST))}"
            )
        return self

    @model_validator(mode="after")
    def _kind_of_a_projection(self) -> Self:
        reduce = getattr(self, "reduce", None)
        if self.kind != "sketch" and reduce != "projection":
            _refuse(
                f"kind: expected none with reduce={reduce!r}, got {self.kind!r}; it belongs to "
                f"'projection'"
            )
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

    @field_validator("dim", check_fields=False)
    @classmethod
    def _dim_of_a_projection(cls, dim: int | None, info: ValidationInfo) -> int | None:
        fits = dim is not None and dim >= 1
        _check_belongs(dim, fits, info, to="projection", expected="a whole number from 1")
        return dim


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
    clip: Annotated[float | None, Field(validate_default=True), NUMBER] = None
    dim: Annotated[int | None, Field(validate_default=True, le=MAX_DIM, strict=True)] = None

    @model_validator(mode="after")
    def _loss_inputs_of_both(self) -> Self:
        unknown = sorted(self.against_loss_inputs.keys() - self.loss_inputs.keys())
        if unknown or (self.against_loss_inputs and self.against_group is None):
            _refuse(
                f"against_loss_inputs: expected names of loss_inputs, with an against_group, got "
                f"{unknown or sorted(self.against_loss_inputs)}"
            )
        return self

    @field_validator("clip")
    @classmethod
    def _clip_of_a_clipped_sum(cls, clip: float | None, info: ValidationInfo) -> float | None:
        fits = clip is not None and isfinite(clip) and clip > 0
        _check_belongs(clip, fits, info, to="clipped_sum", expected="a positive number")
        return clip


class JacobianSpec(SampleSpec, frozen=True):
    """dz_by/dθ of every sample b and output y.

    `vectors` are cotangents of z's shape for `vjp`, and a tangent by parameter name for `jvp`.
    """

    computation: Literal["jacobian"]
    reduce: JacobianReduction = "none"
    form: Form = "dense"
    vectors: Annotated[
        ConstantRef | Entries[TensorName, ConstantRef] | None, Field(validate_default=True)
    ] = None
    dim: Annotated[int | None, Field(validate_default=True, le=MAX_DIM, strict=True)] = None

    @field_validator("vectors")
    @classmethod
    def _vectors_of_a_product(cls, vectors: Any, info: ValidationInfo) -> Any:
        reduce = info.data.get("reduce")
        if reduce == "vjp":
            fits, expected = isinstance(vectors, TensorRef), "one tensor, shaped like z"
        elif reduce == "jvp":
            fits, expected = isinstance(vectors, dict) and bool(vectors), "{parameter: tangent}"
        else:
            fits, expected = vectors is None, "none"
        if not fits and reduce is not None:
            got = "tensors by name" if isinstance(vectors, dict) else "none"
            got = "one tensor" if isinstance(vectors, TensorRef) else got
            _refuse(f"expected {expected} with reduce={reduce!r}, got {got}")
        return vectors


def _check_belongs(value: Any, fits: bool, info: ValidationInfo, *, to: str, expected: str) -> None:
    reduce = info.data.get("reduce")
    if reduce == to and not fits:
        _refuse(f"expected {expected} with reduce={to!r}, got {value!r}")
    if reduce not in (None, to) and value is not None:
        _refuse(f"expected none with reduce={reduce!r}, got {value!r}; it belongs to {to!r}")


def _refuse(why: str) -> None:
    raise PydanticCustomError("per_sample", "{why}", {"why": why})
