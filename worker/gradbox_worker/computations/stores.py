"""Jobs on a gradient store: rows that are appended to it, and queries.

Rows are those of a `PerSampleGradient` that is projected as the store says.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import torch
from torch import Tensor

from gradbox.errors import InvalidInputs
from gradbox.protocol import StoreQuerySpec, StoreRowsSpec, spec_digest
from gradbox_service.stores.ids import ENDS, NUMBERS, TEXTS, Ids
from gradbox_worker.computations import per_sample
from gradbox_worker.computations.job import Computed, LoadedJob
from gradbox_worker.stores.rows import ROWS, ids_at
from gradbox_worker.stores.scoring import scores_of
from gradbox_worker.work import StoredRows

DTYPES: Final = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}


def compute_rows(job: LoadedJob, spec: StoreRowsSpec) -> Computed:
    """Return the rows of samples, rounded to the store's dtype, with their ids and losses."""
    computed = per_sample.compute_gradient(job, spec)
    rows = computed.tensors[ROWS]
    ids = job.tensors.tensor(spec.ids)
    named = {NUMBERS: ids}
    if spec.id_ends is not None:
        named = {TEXTS: ids, ENDS: job.tensors.tensor(spec.id_ends)}
    num_ids = len(next(reversed(named.values())))
    if num_ids != len(rows):
        raise InvalidInputs(f"ids: expected one for each of {len(rows)} samples, got {num_ids}")
    rounded = rows.to(DTYPES[spec.row_dtype])
    if not bool(rounded.isfinite().all()) and bool(rows.isfinite().all()):
        raise InvalidInputs(
            f"expected rows that {spec.row_dtype} holds, got numbers up to "
            f"{rows.abs().max():.3g}: make the store with dtype='bf16' or 'fp32', or scale the loss"
        )
    stored = StoredRows(spec.store, spec_digest(spec.loss), rows.shape[1])
    tensors = {**computed.tensors, ROWS: rounded, **named}
    return replace(computed, tensors=tensors, stored=stored)


def compute_query(job: LoadedJob, spec: StoreQuerySpec) -> Computed:
    """Return the scores of samples with the rows of a store."""
    parts = job.work.store_parts
    computed = per_sample.compute_gradient(job, spec)
    queries = computed.tensors[ROWS]
    found = scores_of(queries, parts, top=spec.top, unit_norm=spec.unit_norm)
    tensors = {n: tensor for n, tensor in computed.tensors.items() if n != ROWS}
    tensors["samples/scores"] = found.scores
    if found.rows is not None:
        tensors["samples/rows"] = found.rows
        tensors |= _id_tensors(ids_at(parts, found.rows.flatten().tolist()))
    return replace(computed, tensors=tensors)


def _id_tensors(ids: Ids) -> dict[str, Tensor]:
    """Return ids as a file holds them, see `gradbox_service.stores.ids`."""
    if not ids or isinstance(ids[0], int):
        return {NUMBERS: torch.tensor(ids, dtype=torch.int64)}
    texts = [str(one).encode() for one in ids]
    ends = torch.tensor([len(text) for text in texts]).cumsum(0)
    content = torch.frombuffer(bytearray(b"".join(texts)), dtype=torch.uint8)
    return {TEXTS: content, ENDS: ends}
