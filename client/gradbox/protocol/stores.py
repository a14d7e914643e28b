"""Gradient stores: rows that stay on the box. What makes one, and what it says of itself.

Rows are appended by jobs (`StoreRowsSpec`), each of which leaves one part of the store, and read by
jobs (`StoreQuerySpec`). What decides the numbers of a row is the store's: model, `wrt`, projection,
seed, mode and precision. Its loss is that of the first rows. Curvature is fitted by a job
(`StoreFitSpec`), and lies beside the rows.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal, Self

from pydantic import Field, StringConstraints, model_validator
from pydantic_core import PydanticCustomError

from gradbox.graphs.wire_form import NUMBER, Items
from gradbox.protocol.options import Mode, Precision, Seed
from gradbox.protocol.per_sample import MAX_DIM, PerSampleGradientSpec, ProjectionKind
from gradbox.protocol.runs import Pattern
from gradbox.protocol.spec_fields import (
    PROTOCOL,
    ConstantRef,
    GraphLoss,
    InputGroup,
    JobId,
    SaveName,
    StateRef,
    Wire,
)
from gradbox.protocol.views import View

RowDtype = Literal["fp16", "bf16", "fp32"]
CurvatureKind = Literal["kfac", "ekfac", "kernel"]
Damping = Annotated[float, Field(gt=0), NUMBER]
# Grants to everybody with a token.
LAB: Final = "*"
Grantee = Annotated[str, StringConstraints(min_length=1, max_length=200)]


class ProjectionSpec(Wire, frozen=True):
    """How a row is projected: to `dim` numbers, or each layer on both sides ("per_layer")."""

    kind: ProjectionKind
    dim: Annotated[int, Field(ge=1, le=MAX_DIM), NUMBER]


# Without a projection each layer is kept whole.
WHOLE: Final = ProjectionSpec(kind="per_layer", dim=MAX_DIM)


class StoreSpec(Wire, frozen=True):
    """A store as it is posted to /v1/stores. Without a projection rows are whole gradients."""

    protocol: Annotated[Literal[1], NUMBER] = PROTOCOL
    name: SaveName
    model: Annotated[str, StringConstraints(min_length=1, max_length=300)]
    wrt: Annotated[Items[Pattern], Field(min_length=1)] | None = None
    projection: ProjectionSpec | None = None
    dtype: RowDtype = "fp16"
    mode: Mode = "eval"
    precision: Precision = "fp32"
    seed: Seed = 0
    state: StateRef | None = None


class StoreRowsSpec(PerSampleGradientSpec, frozen=True):
    """Rows to be appended to a store, one for each sample, in the order of the samples.

    `ids` names the rows: whole numbers (B,) of int64, or the bytes of all ids one after the other,
    UTF-8 as uint8, with `id_ends` (B,), int64: behind which byte each of them ends.
    """

    computation: Literal["store_rows"]  # type: ignore[assignment]
    store: JobId
    row_dtype: RowDtype
    ids: ConstantRef
    id_ends: ConstantRef | None = None


class StoreQuerySpec(PerSampleGradientSpec, frozen=True):
    """Scores ⟨row of a sample, row of the store⟩ for each sample: the `top` largest, or all.

    Behind the `top` largest come the `bottom` smallest of the other rows, largest first.

    With `precondition` the sample's row is multiplied by (H + λ)⁻¹ first, H being that curvature of
    the store's and λ its `damping`, or this one. With `unit_norm` both rows are then scaled to
    norm 1.
    """

    computation: Literal["store_query"]  # type: ignore[assignment]
    store: JobId
    top: Annotated[int, Field(ge=1, le=1_000_000), NUMBER] | None = None
    bottom: Annotated[int, Field(ge=0, le=1_000_000), NUMBER] = 0
    unit_norm: bool = False
    precondition: CurvatureKind | None = None
    damping: Damping | None = None


class StoreFitSpec(PerSampleGradientSpec, frozen=True):
    """Curvature H of a store's rows: of samples ("kfac", "ekfac"), or of the rows ("kernel").

    `damping` is the λ that queries add to it; 0.1 of each block's mean eigenvalue without one.
    """

    computation: Literal["store_fit"]  # type: ignore[assignment]
    store: JobId
    curvature: CurvatureKind
    damping: Damping | None = None
    devices: Literal[1] = 1
    inputs: Annotated[Items[InputGroup], Field(max_length=1)] = []
    loss: GraphLoss | None = None  # type: ignore[assignment]

    @model_validator(mode="after")
    def _of_samples_or_rows(self) -> Self:
        of_rows = self.curvature == "kernel"
        if of_rows != (not self.inputs) or of_rows != (self.loss is None):
            expected = "no inputs and no loss" if of_rows else "inputs and a loss"
            of = "the store's rows" if of_rows else "samples"
            raise PydanticCustomError(
                "fit",
                "expected {expected} with '{kind}', which is the curvature of {of}, got others",
                {"expected": expected, "kind": self.curvature, "of": of},
            )
        return self


class CurvatureView(View):
    """Curvature H that was fitted to a store, made of so many samples or rows.

    `layers` are its blocks, each by its parameters; no block has the parameters of `left_out`, and
    scores leave out their numbers. Queries add `damping` to it.
    """

    kind: CurvatureKind
    job: JobId
    num_samples: int
    layers: list[list[str]]
    left_out: list[str] = []
    damping: float | None = None
    size_bytes: int = 0


class PartView(View):
    """The rows of a store that one job appended: a safetensors file."""

    job: JobId
    num_rows: int
    size_bytes: int
    sha256: str


class StoreView(View):
    """One store. Its rows are those of `parts`, one behind the other.

    `columns` says how many numbers of a row are of which parameter, in their order; a projection of
    all together has the name "projection".
    `grants` are who may read it beside its owner, "*" for everybody; only the owner sees them.
    """

    id: JobId
    name: str
    owner: str
    model: str
    model_version: str
    wrt: list[str] | None = None
    projection: ProjectionSpec | None = None
    dtype: RowDtype
    mode: str
    precision: str
    seed: int
    state: StateRef | None = None
    num_rows: int = 0
    num_columns: int | None = None
    columns: dict[str, int] = {}
    ids: Literal["int", "str"] | None = None
    parts: list[PartView] = []
    curvature: list[CurvatureView] = []
    size_bytes: int = 0
    created_s: float
    used_s: float
    grants: list[str] = []


class StoreList(View):
    """Stores: one's own and those that one may read, newest first."""

    stores: list[StoreView]


class Grants(Wire, frozen=True):
    """Who may read a store beside its owner: all of them, in place of those before."""

    grants: Annotated[Items[Grantee], Field(max_length=1000)]
