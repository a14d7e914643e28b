"""The jobs of a store: rows that are appended to it, queries, and curvature."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypedDict

import numpy as np

from gradbox.computations import PerSampleGradient
from gradbox.computations.computation import Submission, checked
from gradbox.errors import InvalidInputs
from gradbox.inputs.uploads import KnownTensors, Uploads
from gradbox.protocol import (
    WHOLE,
    StoreFitSpec,
    StoreJobSpec,
    StoreQuerySpec,
    StoreRowsSpec,
    StoreView,
)
from gradbox.protocol.options import Devices, Priority, Timeout

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
    devices: Devices
    name: str


# By the kind of a job: what the spec calls it, and where below its store it is posted.
KINDS: Final[Mapping[type[StoreJobSpec], tuple[str, str]]] = {
    StoreRowsSpec: ("store_rows", "rows"),
    StoreQuerySpec: ("store_query", "queries"),
    StoreFitSpec: ("store_fit", "curvature"),
}


@dataclass(frozen=True, kw_only=True, eq=False)
class StoreJob(PerSampleGradient):
    """A job of samples on a store: rows to append, with their `ids`, queries, or curvature.

    `own` are the fields that only its kind of spec has.
    """

    store: StoreView
    spec: type[StoreJobSpec]
    ids: Sequence[Id] | None = None
    own: Mapping[str, Any] = field(default_factory=dict)

    def prepare(self, known: KnownTensors | None = None) -> Submission:
        uploads = Uploads(known)
        fields = self.spec_fields(uploads) | fields_of(self.store, self.spec) | dict(self.own)
        if self.ids is not None:
            named = uploads.named(id_arrays(self.ids), where="ids")
            fields |= {"ids": named["ids"], "id_ends": named.get("ends")}
        spec = checked(self.spec, **fields)
        return Submission.of(spec, uploads, path=path_of(self.store, self.spec))


def path_of(store: StoreView, spec: type[StoreJobSpec]) -> str:
    """Return where a job on a store is posted."""
    return f"/v1/stores/{store.id}/{KINDS[spec][1]}"


def fields_of(store: StoreView, spec: type[StoreJobSpec]) -> dict[str, Any]:
    """Return the fields of a job's spec that its kind and its store decide."""
    projection = store.projection or WHOLE
    of_rows = {"row_dtype": store.dtype} if spec is StoreRowsSpec else {}
    return of_rows | {
        "computation": KINDS[spec][0],
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
