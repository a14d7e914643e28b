"""Jobs on a gradient store: rows that are appended to it, queries, and curvature.

Rows are those of a `PerSampleGradient` that is projected as the store says.
"""

from __future__ import annotations

import time
from dataclasses import replace
from math import prod
from typing import Final

import torch
from torch import Tensor

from gradbox.errors import InvalidInputs
from gradbox.protocol import (
    CurvatureView,
    StoreFitSpec,
    StoreQuerySpec,
    StoreRowsSpec,
    spec_digest,
)
from gradbox_engine.per_sample.curvature import kronecker
from gradbox_factors import TwoSided, projection_of
from gradbox_factors.term import all_finite
from gradbox_service.stores.ids import ENDS, NUMBERS, TEXTS, Ids
from gradbox_worker.computations import per_sample
from gradbox_worker.computations.job import Computed, LoadedJob
from gradbox_worker.stores.curvature import kernel_of, preconditioned, written
from gradbox_worker.stores.rows import ROWS, blocks_of, ids_at
from gradbox_worker.stores.scoring import Question
from gradbox_worker.work import StoredCurvature, StoredRows

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
    if rounded is not rows and not all_finite(rounded) and all_finite(rows):
        raise InvalidInputs(
            f"expected rows that {spec.row_dtype} holds, got numbers up to "
            f"{rows.abs().max():.3g}: make the store with dtype='bf16' or 'fp32', or scale the loss"
        )
    stored = StoredRows(spec.store, spec_digest(spec.loss), _columns(job, spec, computed))
    tensors = {**computed.tensors, ROWS: rounded, **named}
    return replace(computed, tensors=tensors, stored=stored)


def compute_query(job: LoadedJob, spec: StoreQuerySpec) -> Computed:
    """Return the scores of samples with the rows of a store."""
    store = job.work.store
    assert store is not None  # the store of a job that waits is not deleted
    computed = per_sample.compute_gradient(job, spec)
    queries, facts = computed.tensors[ROWS], dict(computed.facts)
    if spec.precondition is not None:
        queries, facts["curvature"] = preconditioned(queries, store, damping=spec.damping)
    question = Question(queries.float(), spec.top, spec.bottom, spec.unit_norm)
    began = time.perf_counter()
    found = job.leading.scored(question, blocks_of(store.parts), job.observer)
    seconds = {**computed.seconds, "products": time.perf_counter() - began}
    tensors = {n: tensor for n, tensor in computed.tensors.items() if n != ROWS}
    tensors["samples/scores"] = found.scores
    if found.rows is not None:
        tensors["samples/rows"] = found.rows
        tensors |= _id_tensors(ids_at(store.parts, found.rows.flatten().tolist()))
    return replace(computed, tensors=tensors, facts=facts, seconds=seconds)


def compute_fit(job: LoadedJob, spec: StoreFitSpec) -> Computed:
    """Return the curvature of samples, or of the store's rows."""
    left_out: tuple[str, ...] = ()
    if spec.curvature == "kernel":
        assert job.work.store is not None
        began = time.perf_counter()
        blocks, num_samples = kernel_of(job.work.store, device=job.device)
        seconds = time.perf_counter() - began
    else:
        fitted = kronecker(
            job.loaded.module,
            job.groups[0].shards,
            per_sample.sample_loss(job, spec),
            TwoSided(spec.dim or 1, spec.seed),
            corrected=spec.curvature == "ekfac",
            loss_inputs=per_sample.loss_inputs(spec, job.tensors),
            **per_sample.calls(job, spec),
        )
        blocks, left_out = fitted.blocks, fitted.left_out
        num_samples, seconds = fitted.found.samples, fitted.found.seconds
    view = CurvatureView(
        kind=spec.curvature,
        job=job.work.job_id,
        num_samples=num_samples,
        layers=[list(names) for names in blocks],
        left_out=list(left_out),
        damping=spec.damping,
    )
    if not blocks:
        raise InvalidInputs(
            f"{spec.curvature!r} is of linear and convolution layers, and of these parameters none "
            f"is one's: {', '.join(left_out)[:200]}; fit 'kernel'"
        )
    return Computed(
        tensors=written(blocks),
        facts={"curvature": view, "samples": num_samples},
        seconds={"samples": seconds},
        stored=StoredCurvature(spec.store, view),
    )


def _columns(job: LoadedJob, spec: StoreRowsSpec, computed: Computed) -> dict[str, int]:
    """Return how many numbers of a row are of which parameter."""
    projection = projection_of(spec.kind, spec.dim or 1, spec.seed)
    if not isinstance(projection, TwoSided):
        return {"projection": projection.dim}
    parameters = dict(job.loaded.module.named_parameters())
    return {n: prod(projection.sizes(parameters[n].shape)) for n in computed.facts["names"]}


def _id_tensors(ids: Ids) -> dict[str, Tensor]:
    """Return ids as a file holds them, see `gradbox_service.stores.ids`."""
    if not ids or isinstance(ids[0], int):
        return {NUMBERS: torch.tensor(ids, dtype=torch.int64)}
    texts = [str(one).encode() for one in ids]
    ends = torch.tensor([len(text) for text in texts]).cumsum(0)
    content = torch.frombuffer(bytearray(b"".join(texts)), dtype=torch.uint8)
    return {TEXTS: content, ENDS: ends}
