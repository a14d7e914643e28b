"""A service whose records tell of a busy day in a lab: nothing computes, everything is shown."""

from __future__ import annotations

import json
import math
import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import uvicorn
from safetensors.numpy import save

from gradbox.errors import ModelCallFailed
from gradbox.protocol import (
    CurvatureView,
    DeviceMemory,
    MethodView,
    ModelView,
    ParameterView,
    Problem,
    ProgressView,
    ResultView,
    RunSpec,
    StepView,
    StoreSpec,
)
from gradbox_service.backing import Backing
from gradbox_service.fleet import WorkerPresence
from gradbox_service.http.app import create_app
from gradbox_service.http.listening import bind
from gradbox_service.jobs import JobRecord
from gradbox_service.runs import RunRecord
from gradbox_service.runs.records import steps_key
from gradbox_service.settings import Settings
from gradbox_service.stores.record import StorePart, StoreRecord
from tests.service.boxes import a_spec
from tests.valkey import empty_backing

GIB = 2**30
LEASE_S = 3600.0
FORWARD = ["input_ids", "attention_mask", "token_type_ids", "position_ids", "inputs_embeds"]
CLIP = {"get_image_features": ["pixel_values"], "get_text_features": FORWARD[:2]}
UNUSABLE = (
    "models.llama-old: expected a folder with config.json at /models/llama-old, found none; check "
    "its source, or run `gradbox models verify llama-old`"
)
# Name, parameters, methods.
MODELS = [
    ("minilm", 22_713_216, {"forward": FORWARD}),
    ("vit-b16", 86_389_248, {"forward": ["pixel_values", "interpolate_pos_encoding"]}),
    ("clip-l14", 427_616_513, CLIP),
    ("stylegan-ffhq", 30_276_583, {"forward": ["z", "label", "truncation"]}),
]  # fmt: skip
NAMES = ["two towers, seed 3", "influence of batch 12", "", "hard negatives", "ntk of block 5", ""]
COMPUTATIONS = ["gradient", "per_sample_gradient", "gradient", "jacobian", "mixed_gradient"]
PEOPLE = ["ada", "grace", "emmy", "sofia", "mary"]


@dataclass(frozen=True)
class Staged:
    """A service on a port, what it stands on, and a token of the box's owner and of ada's."""

    url: str
    backing: Backing
    owner_token: str
    token: str


@contextmanager
def staged(folder: Path) -> Iterator[Staged]:
    """Serve an empty box from a thread of this process."""
    backing = empty_backing(folder)
    bound = bind("127.0.0.1", 0)
    app = create_app(Settings(data=folder), backing=backing)
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, access_log=False))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]}, daemon=True)
    thread.start()
    url = f"http://127.0.0.1:{bound.getsockname()[1]}"
    owner_token = backing.tokens.create("owner", admin=True)
    yield Staged(url, backing, owner_token, backing.tokens.create("ada"))
    app.state.board.close()
    app.state.hub.close()
    server.should_exit = True
    thread.join(30)
    bound.close()


def busy_day(backing: Backing) -> None:
    """Let two devices have worked for a month, and some people wait."""
    draw = random.Random(7)
    now_s = time.time()
    _describe_models(backing)
    for day in range(30):
        for number in range(9 if day else 30):
            owner = draw.choices(PEOPLE, weights=[5, 4, 3, 2, 1])[0]
            ended_s = now_s - day * 86400 - draw.random() * (86400 if day else 50_000) - 30
            lasted_s = draw.lognormvariate(6.2, 0.9)
            ended(backing, f"{day}-{number}", owner, began_s=ended_s - lasted_s, ended_s=ended_s)
    for number in range(5):  # ada's latest, on the second device
        ended(
            backing, f"late-{number}", "ada", began_s=now_s - 700 * (number + 1),
            ended_s=now_s - 700 * (number + 1) + 90 * (number + 2), fails=number == 1,
        )  # fmt: skip
    running = [_wait(backing, n, f"run{n}", now_s - 240 + n) for n in range(2)]
    for number, (job_id, worker) in enumerate(
        zip(running, ("box-cuda-0", "box-cuda-1"), strict=True)
    ):
        begin = partial(JobRecord.begin, worker=worker, now_s=now_s - 190 + 60 * number)
        backing.records.update(job_id, begin, lease_s=LEASE_S)
        progress(backing, job_id, done=41 - 20 * number)
    for number in range(9):
        _wait(backing, number, f"wait{number}", now_s - 200 + 13 * number)
    trained(backing, "towers", "ada", num_steps=240, ended_s=now_s - 40)
    trained(backing, "", "ada", num_steps=3, ended_s=now_s - 90_000, groups=True)
    trained(backing, "barlow", "grace", num_steps=12, ended_s=now_s - 4000)
    kept(backing, "wiki-train", "ada", grants=("grace",), used_s=now_s - 90)
    kept(backing, "shared", "grace", grants=("*",), used_s=now_s - 5000)
    kept(backing, "private", "grace", grants=(), used_s=now_s - 7000)
    _announce(backing, running, now_s)


def many_waiting(backing: Backing, *, num_jobs: int) -> None:
    """Let as many jobs wait, of five people."""
    _describe_models(backing)
    for number in range(num_jobs):
        _wait(backing, number, f"many{number:04}", time.time() - num_jobs + number)
    _announce(backing, [], time.time())


def trained(
    backing: Backing,
    name: str,
    owner: str,
    *,
    num_steps: int,
    ended_s: float,
    groups: bool = False,
) -> str:
    """Let a run have made steps, a second each; return its id."""
    draw = random.Random(num_steps)
    steps = [
        StepView(
            number=number,
            job=f"step{number}",
            loss=0.3 + 2.5 * math.exp(-number / 60) + draw.gauss(0, 0.05),
            grad_norm=4 * math.exp(-number / 90) + draw.random(),
            lr=[2e-5 * min(1, number / 30) * rate for rate in ((1, 0.1) if groups else (1,))],
            seconds=0.9 + 0.2 * draw.random(),
            finished_s=ended_s - num_steps + number,
        )
        for number in range(1, num_steps + 1)
    ]
    optimizer: dict[str, Any] = {"name": "adamw", "options": {"lr": 2e-5}}
    if groups:
        optimizer["groups"] = [{"wrt": ["encoder.layer.5.*"], "options": {"lr": 2e-6}}]
    spec = {"model": "minilm", "optimizer": optimizer, "wrt": ["encoder.*"], "name": name}
    last = steps[-1]
    record = RunRecord(
        id=f"{num_steps:032x}", owner=owner, spec=RunSpec.model_validate(spec), model="minilm",
        model_version="3c9e1f7a04d82b6" * 4, created_s=ended_s - num_steps, num_steps=num_steps,
        last_job=last.job, loss=last.loss, grad_norm=last.grad_norm, last_step_s=ended_s,
        state_step=num_steps, state_bytes=63_000_000,
    )  # fmt: skip
    backing.runs.create(record, idempotency_key=None, digest="d")
    lines = {str(step.number): f"d {step.model_dump_json()}" for step in steps}
    backing.runs._redis.hset(steps_key(record.id), mapping=lines)
    return record.id


def kept(
    backing: Backing, name: str, owner: str, *, grants: tuple[str, ...], used_s: float
) -> None:
    """Let a store have rows and curvature."""
    part = StorePart(job="rows", num_rows=12_000, size_bytes=98_304_000, sha256="0" * 64, ids="int")
    fitted = CurvatureView(
        kind="ekfac", job="fit", num_samples=2000, layers=[["encoder.weight"]], size_bytes=9_000_000
    )
    spec = {"name": name, "model": "minilm", "projection": {"kind": "per_layer", "dim": 16}}
    record = StoreRecord(
        id=f"{sum(map(ord, name)):032x}", owner=owner, created_s=used_s - 9000, used_s=used_s,
        spec=StoreSpec.model_validate(spec), model="minilm", model_version="3c9e1f7a04d82b6" * 4,
        parts=(part,), columns={"encoder.weight": 4096}, curvature=(fitted,), grants=grants,
    )  # fmt: skip
    backing.stores.create(record)


def progress(backing: Backing, job_id: str, *, done: int, total: int = 64) -> None:
    view = ProgressView(phase="replay", done=done, total=total, seconds_left=1.9 * (total - done))
    backing.records.update(job_id, partial(JobRecord.advance, attempt=1, progress=view))


def _describe_models(backing: Backing) -> None:
    views = [
        ModelView(
            name=name,
            version=f"{index + 3:x}c9e1f7a04d82b6" * 4,
            num_parameters=size,
            parameters=[ParameterView(name="weight", shape=[size], dtype="float32")],
            methods={
                method: MethodView(arguments=names, required=names[:1])
                for method, names in methods.items()
            },
        )
        for index, (name, size, methods) in enumerate(MODELS)
    ]
    backing.fleet.describe(views)


def _wait(backing: Backing, number: int, job_id: str, created_s: float) -> str:
    record = JobRecord(
        id=job_id,
        owner=PEOPLE[number % len(PEOPLE)],
        computation=COMPUTATIONS[number % len(COMPUTATIONS)],
        model=MODELS[number % len(MODELS)][0],
        model_version="3c9e1f7a04d82b6",
        spec_digest="d" * 64,
        created_s=created_s,
        name=NAMES[number % len(NAMES)],
    )
    backing.records.create(record, spec=a_spec())
    return job_id


def ended(
    backing: Backing,
    job_id: str,
    owner: str,
    *,
    began_s: float,
    ended_s: float,
    fails: bool = False,
) -> None:
    """Let a job have run from its beginning to its end."""
    number = sum(map(ord, job_id))
    record = JobRecord(
        id=job_id, owner=owner, computation=COMPUTATIONS[number % 5], model=MODELS[number % 4][0],
        model_version="3c9e1f7a04d82b6", spec_digest="d" * 64, created_s=began_s - 12,
        name=NAMES[number % 6],
    )  # fmt: skip
    backing.records.create(record, spec=a_spec())
    worker = f"box-cuda-{number % 2}"
    begin = partial(JobRecord.begin, worker=worker, now_s=began_s)
    backing.records.update(job_id, begin, lease_s=LEASE_S)
    if fails:
        detail = (
            "the model raised RuntimeError: shapes (32, 384) and (768, 384) cannot be multiplied; "
            "it was called with input_ids int64 (32, 128), attention_mask int64 (32, 128); check "
            "which encoder these shards were tokenized for"
        )
        problem = Problem.of(ModelCallFailed(detail))
        end = partial(JobRecord.fail, attempt=1, error=problem, now_s=ended_s)
        backing.records.update(job_id, end)
        return
    data = _result(job_id, record, ended_s - began_s)
    path = backing.results.path(job_id, attempt=1)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    size = int(90_000_000 * (0.2 + number % 7))
    result = ResultView(size_bytes=size, sha256="0" * 64)
    backing.records.update(
        job_id, partial(JobRecord.finish, attempt=1, result=result, now_s=ended_s)
    )


def _result(job_id: str, record: JobRecord, lasted_s: float) -> bytes:
    receipt = {
        "protocol": 1, "job": job_id, "spec_digest": "d" * 64, "computation": record.computation,
        "model": record.model, "model_version": "3c9e1f7a04d82b6" * 4, "seed": 3, "mode": "train",
        "precision": "bf16", "device": "cuda:0 (NVIDIA H100 80GB HBM3)", "torch": "2.13.0",
        "gradbox": "0.1.0", "loss": 2.3841, "shards": {"queries": 64, "passages": 64},
        "shards_retained": 22, "shards_replayed": 106, "replay_difference": 0.0,
        "names": [f"encoder.layer.{index}" for index in range(103)],
        "seconds": {"queued": 12.0, "load": 0.4, "forward": 0.23 * lasted_s,
                    "cotangents": 0.02 * lasted_s, "replay": 0.74 * lasted_s},
        "peak_memory_bytes": 31 * GIB, "memory_before_bytes": GIB,
    }  # fmt: skip
    return save(
        {"grads/weight": np.zeros(4, np.float32)}, metadata={"gradbox": json.dumps(receipt)}
    )


def _announce(backing: Backing, jobs: list[str], now_s: float) -> None:
    versions = {
        name: f"{index + 3:x}c9e1f7a04d82b6" * 4 for index, (name, _, _) in enumerate(MODELS)
    }
    for index, (loaded, job_bytes) in enumerate(
        (
            ({"minilm": 90_852_864, "clip-l14": 1_710_466_052}, 34 * GIB),
            ({"vit-b16": 345_556_992}, 9 * GIB),
        )
    ):
        memory = DeviceMemory(
            total_bytes=80 * GIB,
            used_bytes=sum(loaded.values()) + job_bytes + GIB // 2,
            models=loaded,
            job_bytes=job_bytes,
        )
        presence = WorkerPresence(
            name=f"box-cuda-{index}",
            device=f"cuda:{index}",
            state="busy" if jobs else "idle",
            models=versions,
            unusable={"llama-old": UNUSABLE},
            job=jobs[index] if jobs else None,
            host="box",
            started_s=now_s - 90_000,
            hardware="NVIDIA H100 80GB HBM3",
            memory=memory,
        )
        backing.fleet.announce(presence, ttl_s=LEASE_S)
