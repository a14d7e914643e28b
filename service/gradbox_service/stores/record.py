"""What the box knows of a store beside its rows, and how that changes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from gradbox.errors import InvalidInputs
from gradbox.protocol import LAB, CurvatureView, PartView, StoreSpec, StoreView
from gradbox_service.database.owned import OwnedRecord


@dataclass(frozen=True)
class StorePart:
    """The rows that one job appended, one file."""

    # The job, by which the file is named.
    job: str
    num_rows: int
    size_bytes: int
    sha256: str
    ids: Literal["int", "str"]


@dataclass(frozen=True, kw_only=True)
class StoreRecord(OwnedRecord):
    """A store."""

    spec: StoreSpec
    # The registered name, and the full version that all rows are of.
    model: str
    model_version: str
    used_s: float
    # The digest of the loss that the first rows were made by; "" before there are any.
    loss: str = ""
    parts: tuple[StorePart, ...] = ()
    # How many numbers of a row are of which parameter, since the first rows.
    columns: Mapping[str, int] = field(default_factory=dict)
    # One of a kind.
    curvature: tuple[CurvatureView, ...] = ()
    # Who may read it beside its owner; LAB is everybody.
    grants: tuple[str, ...] = ()

    @property
    def num_rows(self) -> int:
        return sum(part.num_rows for part in self.parts)

    @property
    def kept_bytes(self) -> int:
        """What its files take."""
        return sum(self.files.values())

    @property
    def files(self) -> Mapping[str, int]:
        """What each file takes, by the job that it is named by."""
        of_rows = {part.job: part.size_bytes for part in self.parts}
        return of_rows | {one.job: one.size_bytes for one in self.curvature}

    @property
    def full_model(self) -> str:
        """The model as NAME@VERSION."""
        return f"{self.model}@{self.model_version}"

    def may_read(self, caller: str) -> bool:
        """Return whether somebody may query it."""
        return caller == self.owner or caller in self.grants or LAB in self.grants

    def with_part(
        self, part: StorePart, *, loss: str, columns: Mapping[str, int], now_s: float
    ) -> StoreRecord:
        """Add rows behind those that there are."""
        parts = (*self.parts, part)
        return replace(self, parts=parts, loss=loss, columns=dict(columns), used_s=now_s)

    def fitted(self, curvature: CurvatureView, *, now_s: float) -> StoreRecord:
        """Add curvature in place of the one of its kind."""
        others = [one for one in self.curvature if one.kind != curvature.kind]
        return replace(self, curvature=(*others, curvature), used_s=now_s)

    def curvature_of(self, kind: str) -> CurvatureView | None:
        """Return the curvature of a kind."""
        return next((one for one in self.curvature if one.kind == kind), None)

    def used(self, *, now_s: float) -> StoreRecord:
        """Note that it is used now."""
        return replace(self, used_s=now_s)

    def granted(self, to: Sequence[str]) -> StoreRecord:
        """Let these people read it, and nobody else."""
        return replace(self, grants=tuple(sorted(set(to))))

    def view(self, *, of_owner: bool) -> StoreView:
        """Return what the wire says of it."""
        first, spec = next(iter(self.parts), None), self.spec
        shown = {name: getattr(spec, name) for name in _SHOWN_OF_SPEC}
        return StoreView(
            **shown | {name: getattr(self, name) for name in _SHOWN},
            num_rows=self.num_rows,
            num_columns=sum(self.columns.values()) or None,
            ids=None if first is None else first.ids,
            parts=[PartView.model_validate(part, from_attributes=True) for part in self.parts],
            size_bytes=self.kept_bytes,
            grants=list(self.grants) if of_owner else [],
        )


# What the wire calls as the record and its spec do.
_SHOWN = {*("id", "owner", "model", "model_version", "created_s", "used_s", "columns", "curvature")}
_SHOWN_OF_SPEC = StoreView.model_fields.keys() & StoreSpec.model_fields.keys() - _SHOWN


def check_loss(loss: str, store: StoreRecord) -> None:
    """Check that rows are of the loss of those that a store has.

    Args:
        loss: the digest of its graph and the tensors that it holds.

    Raises:
        InvalidInputs: they are of another one.
    """
    if store.loss not in ("", loss):
        raise InvalidInputs(
            f"loss: expected that of the rows which store {store.spec.name!r} has, got another: "
            f"make another store for it"
        )
