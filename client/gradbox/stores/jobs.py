"""The jobs of a store: rows that are appended to it, and queries."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

import numpy as np

from gradbox.computations import PerSampleGradient
from gradbox.computations.computation import Submission, checked
from gradbox.errors import InvalidInputs
from gradbox.inputs.uploads import KnownTensors, Uploads
from gradbox.protocol import WHOLE, StoreQuerySpec, StoreRowsSpec, StoreView
from gradbox.protocol.options import Priority, Timeout

Id = int | str


class StoreJobKeywords(TypedDict, total=False):
    """The arguments of `PerSampleGradient` that jobs on a store take beside inputs and loss."""

    loss_inputs: Mapping[str, Any]
    method: str
    output: str | int | None
    readout: Any
    unchecked: Sequence[Any]
    priority: Priority
    timeout_s: Timeout
    name: str


@dataclass(frozen=True, kw_only=True, eq=False)
class StoreRows(PerSampleGradient):
    """Rows that are appended to a store, one for each sample, named by `ids`."""

    store: StoreView
    ids: Sequence[Id]

    def prepare(self, known: KnownTensors | None = None) -> Submission:
        uploads = Uploads(known)
        named = uploads.named(id_arrays(self.ids), where="ids")
        fields = _fields(self, self.store, uploads) | {
            "computation": "store_rows",
            "row_dtype": self.store.dtype,
            "ids": named["ids"],
            "id_ends": named.get("ends"),
        }
        return Submission.of(
            checked(StoreRowsSpec, **fields), uploads, path=f"/v1/stores/{self.store.id}/rows"
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class StoreQuery(PerSampleGradient):
    """Scores of samples with the rows of a store."""

    store: StoreView
    top: int | None
    unit_norm: bool

    def prepare(self, known: KnownTensors | None = None) -> Submission:
        uploads = Uploads(known)
        fields = _fields(self, self.store, uploads) | {
            "computation": "store_query",
            "top": self.top,
            "unit_norm": self.unit_norm,
        }
        return Submission.of(
            checked(StoreQuerySpec, **fields), uploads, path=f"/v1/stores/{self.store.id}/queries"
        )


def _fields(computation: PerSampleGradient, store: StoreView, uploads: Uploads) -> dict[str, Any]:
    projection = store.projection or WHOLE
    return computation.spec_fields(uploads) | {
        "store": store.id,
        "model": f"{store.model}@{store.model_version}",
        "wrt": store.wrt,
        "mode": store.mode,
        "precision": store.precision,
        "seed": store.seed,
        "state": store.state,
        "reduce": "projection",
        "form": "dense",
        "kind": projection.kind,
        "dim": projection.dim,
    }


def id_arrays(ids: Sequence[Id]) -> dict[str, Any]:
    """Return ids as arrays: int64, or the bytes of texts and where each ends.

    Raises:
        InvalidInputs: they are neither whole numbers nor texts.
    """
    given = list(ids)
    if given and all(isinstance(one, str) for one in given):
        texts = [str(one).encode() for one in given]
        return {
            "ids": np.frombuffer(b"".join(texts), dtype=np.uint8),
            "ends": np.cumsum([len(text) for text in texts], dtype=np.int64),
        }
    try:
        return {"ids": np.array([_whole(one) for one in given], dtype=np.int64)}
    except (TypeError, OverflowError):
        raise InvalidInputs(
            f"ids: expected whole numbers below 2**63, or texts, one for each sample, got "
            f"{given[:3]!r:.120}"
        ) from None


def _whole(one: Any) -> int:
    if isinstance(one, bool | str):
        raise TypeError
    return int(one.__index__())
