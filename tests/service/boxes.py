"""What the service's tests hand to it: a model, blobs, specs, a worker in a few lines."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping
from functools import partial
from typing import Any

import httpx
import numpy as np
from safetensors.numpy import save

from gradbox.protocol import (
    JobSpec,
    MethodView,
    ModelView,
    ParameterView,
    ProgressView,
    ResultView,
    parse_spec,
)
from gradbox_service.backing import Backing
from gradbox_service.database.conditional_commands import Beside
from gradbox_service.fleet import WorkerPresence
from gradbox_service.jobs import JobRecord, Records

VERSION = "a1" * 32
MODEL = ModelView(
    name="tiny",
    version=VERSION,
    num_parameters=6,
    parameters=[
        ParameterView(name="layer.weight", shape=[2, 2], dtype="float32"),
        ParameterView(name="layer.bias", shape=[2], dtype="float32"),
    ],
    buffers=[ParameterView(name="norm.running_mean", shape=[2], dtype="float32")],
    methods={
        "forward": MethodView(arguments=["x", "mask"], required=["x"]),
        "embed": MethodView(arguments=["x"], required=["x"], any_keyword=True),
        "stack": MethodView(arguments=["x"], required=["x"], any_positional=True),
    },
)
LEASE_S = 5.0


def announce(box: Backing, *, state: Any = "idle", name: str = "worker-1") -> None:
    """Let a worker offer MODEL."""
    box.fleet.describe([MODEL])
    models = {} if state == "starting" else {MODEL.name: MODEL.version}
    presence = WorkerPresence(name=name, device="cpu", state=state, models=models)
    box.fleet.announce(presence, ttl_s=600.0)


def blob_of(tensors: Mapping[str, np.ndarray[Any, Any]]) -> tuple[str, bytes]:
    """Return a safetensors file and its digest."""
    data = save(dict(tensors))
    return hashlib.sha256(data).hexdigest(), data


def ones(*shape: int) -> np.ndarray[Any, Any]:
    return np.ones(shape, np.float32)


SHARDS = {"0/x": ones(2, 2), "1/x": ones(1, 2), "labels": np.arange(3)}


def spec_for(blob: str, **fields: Any) -> dict[str, Any]:
    """Return the JSON of a job over the two shards of SHARDS."""
    shards = [{"blob": blob, "prefix": "0/"}, {"blob": blob, "prefix": "1/"}]
    loss = {"kind": "builtin", "name": "cross_entropy"}
    labels = {"labels": {"blob": blob, "tensor": "labels"}}
    spec = {
        "computation": "gradient",
        "model": "tiny",
        "inputs": [{"shards": shards}],
        "loss": loss,
        "loss_inputs": labels,
    }
    return spec | fields


def a_spec(**fields: Any) -> JobSpec:
    return parse_spec(spec_for("0" * 64, **fields))


def a_record(job_id: str = "job1", **fields: Any) -> JobRecord:
    given: dict[str, Any] = {
        "id": job_id,
        "owner": "ann",
        "computation": "gradient",
        "model": "tiny",
        "model_version": VERSION,
        "spec_digest": "d" * 64,
        "created_s": 1.0,
    }
    return JobRecord(**(given | fields))


def upload(client: httpx.Client, tensors: Mapping[str, np.ndarray[Any, Any]]) -> str:
    """Put a blob on the box."""
    digest, data = blob_of(tensors)
    client.put(f"/v1/blobs/{digest}", content=data).raise_for_status()
    return digest


def submit(client: httpx.Client, **fields: Any) -> str:
    """Upload SHARDS, post a job over them and return its id."""
    answer = client.post("/v1/jobs", json=spec_for(upload(client, SHARDS), **fields))
    assert answer.status_code == 202, answer.text
    return str(answer.json()["id"])


def begin(records: Records, job_id: str, *, lease_s: float = LEASE_S) -> JobRecord:
    """Take a job as a worker does."""
    record = records.update(
        job_id, partial(JobRecord.begin, worker="worker-1", now_s=time.time()), lease_s=lease_s
    )
    assert record is not None
    return record


def advance(records: Records, job_id: str, *, attempt: int, done: int, total: int = 2) -> None:
    progress = ProgressView(phase="forward", done=done, total=total)
    records.update(job_id, partial(JobRecord.advance, attempt=attempt, progress=progress))


def finish(box: Backing, job_id: str, *, attempt: int, data: bytes) -> None:
    """End a job with a result file of these bytes."""
    path = box.results.path(job_id, attempt=attempt)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    result = ResultView(size_bytes=len(data), sha256=hashlib.sha256(data).hexdigest())
    record = box.records.update(
        job_id, partial(JobRecord.finish, attempt=attempt, result=result, now_s=time.time())
    )
    assert record is not None


def finish_small(box: Backing, job_id: str, *, data: bytes, attempt: int = 1) -> None:
    """Begin a job, and end an attempt with a result that is in Redis."""
    begin(box.records, job_id)
    result = ResultView(size_bytes=len(data), sha256=hashlib.sha256(data).hexdigest())
    box.records.update(
        job_id,
        partial(JobRecord.finish, attempt=attempt, result=result, now_s=time.time()),
        beside=lambda _: Beside(
            partial(box.results.write, job_id=job_id, attempt=attempt, content=data)
        ),
    )


def run_job(box: Backing, job_id: str, *, data: bytes) -> None:
    """Do what a worker does with a job, from begin to end."""
    attempt = begin(box.records, job_id).attempt
    advance(box.records, job_id, attempt=attempt, done=1)
    finish(box, job_id, attempt=attempt, data=data)


def events_of(lines: list[str]) -> list[tuple[str, str, dict[str, Any]]]:
    """Read (id, event, data) out of an event stream's lines."""
    found: list[tuple[str, str, dict[str, Any]]] = []
    fields: dict[str, str] = {}
    for line in lines:
        if line and not line.startswith(":"):
            name, _, value = line.partition(": ")
            fields[name] = value
        elif fields:
            found.append((fields["id"], fields["event"], json.loads(fields["data"])))
            fields = {}
    return found
