"""Gradient stores: rows that stay on the box. What makes one, and what it says of itself.

Rows are appended by jobs (`StoreRowsSpec`), each of which leaves one part of the store, and read by
jobs (`StoreQuerySpec`). What decides the numbers of a row is the store's: model, `wrt`, projection,
seed, mode and precision. Its loss is that of the first rows.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

from pydantic import Field, StringConstraints

from gradbox.graphs.wire_form import NUMBER, Items
from gradbox.protocol.options import Mode, Precision, Seed
from gradbox.protocol.per_sample import MAX_DIM, PerSampleGradientSpec, ProjectionKind
from gradbox.protocol.runs import Pattern
from gradbox.protocol.spec_fields import PROTOCOL, ConstantRef, JobId, SaveName, StateRef, Wire
from gradbox.protocol.views import View

RowDtype = Literal["fp16", "bf16", "fp32"]
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

    With `unit_norm` both rows are scaled to norm 1 first.
    """

    computation: Literal["store_query"]  # type: ignore[assignment]
    store: JobId
    top: Annotated[int, Field(ge=1, le=1_000_000), NUMBER] | None = None
    unit_norm: bool = False


class PartView(View):
    """The rows of a store that one job appended: a safetensors file."""

    job: JobId
    num_rows: int
    size_bytes: int
    sha256: str


class StoreView(View):
    """One store. Its rows are those of `parts`, one behind the other.

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
    ids: Literal["int", "str"] | None = None
    parts: list[PartView] = []
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
