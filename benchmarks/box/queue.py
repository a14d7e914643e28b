"""The queue at size: submit, list, wait and drain with many jobs queued.

A real `gradbox service` on a real embedded Redis (appendfsync everysec), each a process of its own.
Jobs are posted and listed over HTTP. In place of workers with devices, a loop in this process takes
turns off RQ's list, begins each job and ends it at once with an empty result, so that the queue
alone is measured. The jobs to wait behind are written as records of four owners. Two such boxes,
one with 20 jobs queued and one with all, drain 20 at a time in turn.
"""

from __future__ import annotations

import hashlib
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import redis
from safetensors.numpy import save

from benchmarks.box.small_jobs import cpu_ms
from benchmarks.measure import median_ms
from benchmarks.page import section, table, verdicts
from gradbox.protocol import MethodView, ModelView, ParameterView, ResultView, parse_spec
from gradbox_service.backing import Backing
from gradbox_service.database.connection import connect
from gradbox_service.fleet import WorkerPresence
from gradbox_service.jobs import QUEUE, JobRecord
from gradbox_service.settings import Settings
from gradbox_service.up.embedded_redis import EmbeddedRedis

FEW = 20
REST_S = 0.2
VERSION = "a1" * 32
MODEL = ModelView(
    name="tiny",
    version=VERSION,
    num_parameters=4,
    parameters=[ParameterView(name="weight", shape=[2, 2], dtype="float32")],
    buffers=[],
    methods={"forward": MethodView(arguments=["x"], required=["x"])},
)
RESULT = ResultView(size_bytes=0, sha256="0" * 64)
OWNERS = ("ann", "bob", "cem", "dee")


@dataclass(frozen=True)
class QueueCosts:
    """Medians in ms, shares of a core and jobs a second; `load` is the machine's, of a minute."""

    num_queued: int
    submit_ms: float
    list_ms: float
    page_through_s: float
    waiting_share: float
    rate_few: float
    rate_many: float
    load: float


def measure_queue(num_queued: int, *, num_drained: int = 900) -> QueueCosts:
    """Run the benchmark with so many jobs queued; the two rates are medians of rounds in turn."""
    with _started() as few, _started() as many:
        _fill(many, num_queued)
        submit_ms = median_ms(partial(_submit, many), 50)
        list_ms = median_ms(lambda: many.client.get("/v1/jobs").raise_for_status(), 30)
        began = time.perf_counter()
        last = _page_through(many.client)
        page_through_s = time.perf_counter() - began
        follow = partial(many.client.get, f"/v1/jobs/{last}")
        share = _cpu_share(many.pids, follow, seconds=10.0)
        rates_few: list[float] = []
        rates_many: list[float] = []
        for _ in range(num_drained // FEW):
            _fill(few, FEW)
            for box, rates in ((many, rates_many), (few, rates_few)):
                time.sleep(REST_S)  # until neither service hears of what came before
                rates.append(_drain(box, FEW))
        return QueueCosts(
            num_queued=num_queued,
            submit_ms=submit_ms,
            list_ms=list_ms,
            page_through_s=page_through_s,
            waiting_share=share,
            rate_few=statistics.median(rates_few),
            rate_many=statistics.median(rates_many),
            load=os.getloadavg()[0],
        )


@dataclass(frozen=True)
class _Box:
    """A service on a Redis of its own, what it stands on, and a client of it."""

    backing: Backing
    connection: redis.Redis
    client: httpx.Client
    pids: list[int]
    spec: dict[str, object]


@contextmanager
def _started() -> Iterator[_Box]:
    with tempfile.TemporaryDirectory(prefix="gradbox-queue-") as name:
        folder = Path(name)
        server = EmbeddedRedis.start(folder / "redis")
        try:
            backing = Backing.on_redis(Settings(redis_url=server.url, data=folder / "data"))
            _announce(backing, state="busy")
            headers = {"Authorization": f"Bearer {backing.tokens.create('ann')}"}
            port = _free_port()
            with (
                connect(server.url) as connection,
                _service(server.url, folder / "data", port) as pid,
                httpx.Client(base_url=f"http://127.0.0.1:{port}", headers=headers) as client,
            ):
                _until_up(client)
                yield _Box(backing, connection, client, [pid, server.part.pid or 0], _spec(client))
        finally:
            server.stop()


@contextmanager
def _service(redis_url: str, data: Path, port: int) -> Iterator[int]:
    process = subprocess.Popen(
        [
            sys.executable, "-m", "gradbox", "service", "--redis-url", redis_url,
            "--data", str(data), "--port", str(port),
            "--max-queued-jobs", "1000000", "--requests-per-s", "100000",
        ],
        stdout=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        yield process.pid
    finally:
        process.terminate()
        process.wait(30)


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


def queue_section(found: QueueCosts) -> str:
    """Describe the benchmark."""
    ratio = found.rate_many / found.rate_few
    rows = [
        ["submit, median", f"{found.submit_ms:.1f} ms", "15 ms"],
        ["list of 100, median", f"{found.list_ms:.1f} ms", "20 ms"],
        ["all jobs listed, page by page", f"{found.page_through_s:.2f} s", ""],
        ["service and Redis while all wait", f"{found.waiting_share:.1%} of a core", "3 %"],
        [f"drained with {FEW} queued", f"{found.rate_few:.0f} jobs/s", ""],
        ["drained with all queued", f"{found.rate_many:.0f} jobs/s", f"{ratio:.2f} of it (0.9)"],
    ]
    bars = [
        (found.submit_ms <= 15, "submit within 15 ms"),
        (found.list_ms <= 20, "list within 20 ms"),
        (found.waiting_share <= 0.03, "waiting takes 3 % of a core at most"),
        (ratio >= 0.9, f"drained at 0.9 of the rate with {FEW} queued"),
    ]
    return section(
        "Queue",
        f"{found.num_queued} jobs queued, load of the machine {found.load:.1f}. One follower "
        "asks for the last job of the queue every second.",
        table(["", "measured", "allowed"], rows),
        verdicts(bars),
    )


def _announce(box: Backing, *, state: str) -> None:
    box.fleet.describe([MODEL])
    worker = WorkerPresence.model_validate(
        {"name": "w", "device": "cpu", "state": state, "models": {MODEL.name: VERSION}}
    )
    box.fleet.announce(worker, ttl_s=3600.0)


def _until_up(client: httpx.Client) -> None:
    give_up = time.monotonic() + 60.0
    while time.monotonic() < give_up:
        try:
            client.get("/livez").raise_for_status()
            return
        except httpx.TransportError:
            time.sleep(0.1)
    raise TimeoutError("expected the service to answer within 60 s; see its log above")


def _spec(client: httpx.Client) -> dict[str, object]:
    data = save({"0/x": np.ones((2, 2), np.float32), "labels": np.arange(2)})
    blob = hashlib.sha256(data).hexdigest()
    client.put(f"/v1/blobs/{blob}", content=data).raise_for_status()
    return {
        "computation": "gradient",
        "model": MODEL.name,
        "inputs": [{"shards": [{"blob": blob, "prefix": "0/"}]}],
        "loss": {"kind": "builtin", "name": "cross_entropy"},
        "loss_inputs": {"labels": {"blob": blob, "tensor": "labels"}},
    }


def _fill(box: _Box, num_jobs: int) -> None:
    parsed = parse_spec(box.spec)
    for number in range(num_jobs):
        record = JobRecord(
            id=uuid.uuid4().hex,
            owner=OWNERS[number % len(OWNERS)],
            computation="gradient",
            model=MODEL.name,
            model_version=VERSION,
            spec_digest="d" * 64,
            created_s=time.time(),
        )
        box.backing.records.create(record, spec=parsed)


def _submit(box: _Box) -> None:
    box.client.post("/v1/jobs", json=box.spec).raise_for_status()


def _page_through(client: httpx.Client) -> str:
    """List all jobs and return the id of the newest."""
    newest, cursor = "", None
    while True:
        query = {"limit": "500"} | ({} if cursor is None else {"cursor": cursor})
        page = client.get("/v1/jobs", params=query).raise_for_status().json()
        newest = newest or page["jobs"][0]["id"]
        cursor = page["next"]
        if cursor is None:
            return newest


def _cpu_share(pids: list[int], each_second: Callable[[], object], *, seconds: float) -> float:
    time.sleep(3.0)  # what filling the queue set off is done
    before, began = sum(map(cpu_ms, pids)), time.monotonic()
    while time.monotonic() - began < seconds:
        each_second()
        time.sleep(1.0)
    return (sum(map(cpu_ms, pids)) - before) / 1e3 / (time.monotonic() - began)


def _drain(box: _Box, num_jobs: int) -> float:
    """Take turns until so many jobs have ended; return jobs a second."""
    ended = 0
    began = time.perf_counter()
    while ended < num_jobs:
        taken: Any = box.connection.blpop([f"rq:queue:{QUEUE}"], timeout=10)
        if taken is None:
            raise TimeoutError("expected the dispatcher to feed a turn within 10 s")
        job_id = taken[1].decode().rsplit("-", 2)[0]
        begin = partial(JobRecord.begin, worker="w", now_s=time.time())
        record = box.backing.records.update(job_id, begin, lease_s=60.0)
        if record is not None:
            finish = partial(
                JobRecord.finish, attempt=record.attempt, result=RESULT, now_s=time.time()
            )
            box.backing.records.update(job_id, finish)
            ended += 1
    return ended / (time.perf_counter() - began)
