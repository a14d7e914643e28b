"""A box for worker tests: real Redis, real dispatcher, and jobs posted straight to the records."""

from __future__ import annotations

import hashlib
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from gradbox.protocol import (
    GradientSpec,
    GraphLoss,
    InputGroup,
    JobSpec,
    JobState,
    Receipt,
    ShardRef,
    TracedFunction,
    spec_digest,
)
from gradbox.tensors.safetensors_header import read_header
from gradbox.tracing.trace import trace
from gradbox_service.backing import Backing
from gradbox_service.jobs import JobRecord
from gradbox_service.queue.dispatch import Dispatcher
from gradbox_service.queue.short_list import TURN_GRACE_S
from gradbox_service.settings import Settings
from gradbox_service.up.embedded_redis import EmbeddedRedis
from tests.boxes import tensors_in
from tests.device import DEVICE
from tests.worker import zoo

Shards = Sequence[Mapping[str, Tensor]]


def sum_of_squares(z: Tensor) -> Tensor:
    return (z * z).sum()


def traced(function: Callable[..., Tensor]) -> GraphLoss:
    return GraphLoss(function=TracedFunction(graph=trace(function, positional=1).graph))


class Box:
    """Posts jobs and reads what became of them."""

    def __init__(self, folder: Path, backing: Backing, *, redis_url: str = "") -> None:
        self.folder = folder
        self.backing = backing
        self.redis_url = redis_url
        self.models_file = folder / "models.toml"

    def order(self, what: str) -> None:
        """Tell `zoo.Misbehaving` what to do; see there."""
        beside = self.folder / "order.part"
        beside.write_text(what)
        beside.rename(self.folder / "order")

    def upload(self, tensors: Mapping[str, Tensor]) -> str:
        content = save(dict(tensors))
        digest = hashlib.sha256(content).hexdigest()
        if self.backing.blobs.size_bytes(digest) is None:
            self.backing.blobs.put(digest, [content])
        return digest

    def spec(self, shards: Shards, *, model: str = "m", **given: Any) -> GradientSpec:
        refs = [ShardRef(blob=self.upload(shard)) for shard in shards]
        return GradientSpec(
            **{
                "computation": "gradient",
                "model": model,
                "inputs": [InputGroup(shards=refs)],
                "loss": traced(sum_of_squares),
                **given,
            }
        )

    def submit(self, spec: JobSpec, *, version: str | None = None) -> str:
        if version is None:
            workers = self.backing.fleet.workers()
            version = next((w.models[spec.model] for w in workers if spec.model in w.models), "")
        record = JobRecord(
            id=secrets.token_hex(6),
            owner="alice",
            computation=spec.computation,
            model=spec.model,
            model_version=version,
            spec_digest=spec_digest(spec),
            created_s=time.time(),
            timeout_s=spec.timeout_s,
        )
        return self.backing.records.create(record, spec=spec).id

    def record(self, job_id: str) -> JobRecord:
        record = self.backing.records.get(job_id)
        assert record is not None
        return record

    def wait(
        self,
        job_id: str,
        until: Callable[[JobRecord], bool] = lambda record: record.state.final,
        *,
        timeout_s: float = 120.0,
    ) -> JobRecord:
        deadline = time.monotonic() + timeout_s
        while not until(record := self.record(job_id)):
            assert time.monotonic() < deadline, f"still {record}"
            time.sleep(0.02)
        return record

    def cancel(self, job_id: str) -> None:
        self.backing.records.update(job_id, lambda r: r.request_cancel(now_s=time.time()))

    def result(self, record: JobRecord) -> tuple[dict[str, Tensor], Receipt]:
        path = self.backing.results.on_disk(record.id, attempt=record.attempt)
        content = path.read_bytes()
        assert record.result is not None
        assert record.result.sha256 == hashlib.sha256(content).hexdigest()
        assert record.result.size_bytes == len(content)
        return tensors_in(path), receipt_at(path)


class WorkerProcess:
    """A real `gradbox worker`, with its device process and that one's guardian."""

    def __init__(self, box: Box, *options: str, name: str = "w1") -> None:
        self.log = box.folder / f"{name}.{secrets.token_hex(2)}.log"
        command = [sys.executable, "-m", "gradbox_worker", "--models", str(box.models_file)]
        command += ["--device", str(DEVICE), "--data", str(box.folder), "--name", name]
        command += ["--redis-url", box.redis_url, *options]
        # What this process was told to import is what the worker is to be made of.
        paths = os.pathsep.join(filter(None, (os.getcwd(), os.environ.get("PYTHONPATH"))))
        self._started_s = time.time()
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                command,
                stderr=log,
                env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": paths},
            )
        self._box = box
        self.name = name

    @property
    def device_log(self) -> str:
        """What its device processes have printed, where that goes to a file of its own."""
        return (self._box.folder / "logs" / "device.log").read_text()

    @property
    def child_pid(self) -> int:
        """Its device process; ValueError if there is none."""
        return child_called("gradbox-device", of=self.process.pid)

    def wait_until_ready(self, *, timeout_s: float = 120.0) -> None:
        deadline = time.monotonic() + timeout_s
        while True:
            # What a killed worker of this name has said stays a while.
            workers = self._box.backing.fleet.workers()
            own = [w for w in workers if w.name == self.name and w.started_s > self._started_s]
            if [w.state for w in own] == ["idle"]:
                return
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.02)

    def stop(self, how: int = signal.SIGTERM) -> int:
        self.process.send_signal(how)
        return self.process.wait(timeout=120)


def child_called(name: str, *, of: int) -> int:
    """Return the one living child of a process with this name; ValueError if there is not one."""
    children = map(int, Path(f"/proc/{of}/task/{of}/children").read_text().split())
    (found,) = [child for child in children if _name(child) == name]
    return found


def _name(pid: int) -> str:
    try:
        ended = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
        return "" if ended else Path(f"/proc/{pid}/comm").read_text().strip()
    except FileNotFoundError:
        return ""


def eventually(find: Callable[[], int], *, other_than: int = 0) -> int:
    """Return the process that is found, once there is one."""
    give_up = time.monotonic() + 60
    while time.monotonic() < give_up:
        try:
            if (found := find()) != other_than:
                return found
        except ValueError:  # none, or two for a moment
            pass
        time.sleep(0.01)
    raise AssertionError("there is none after 60 s")


def is_zombie(pid: int) -> bool:
    """Tell whether a process has ended, whether its parent knows or not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


@contextmanager
def dispatching(backing: Backing, *, turn_grace_s: float = TURN_GRACE_S) -> Iterator[None]:
    """Feed the backing's turns from its records while the context lasts."""
    with Dispatcher(backing, turn_grace_s=turn_grace_s):
        yield


@contextmanager
def running_box(folder: Path) -> Iterator[Box]:
    """Run Redis and a dispatcher; the workers are the caller's."""
    server = EmbeddedRedis.start(folder / "redis")
    backing = Backing.on_redis(Settings(redis_url=server.url, data=folder))
    try:
        with dispatching(backing):
            yield Box(folder, backing, redis_url=server.url)
    finally:
        server.stop()


@contextmanager
def running_worker(box: Box, *options: str, name: str = "w1") -> Iterator[WorkerProcess]:
    """Run a worker until the context ends; it is killed if it does not stop."""
    worker = WorkerProcess(box, *options, name=name)
    try:
        worker.wait_until_ready()
        yield worker
    finally:
        if worker.process.poll() is None:
            worker.process.terminate()
            try:
                worker.process.wait(60)
            except subprocess.TimeoutExpired:
                worker.process.kill()
                worker.process.wait()


def register_misbehaving(box: Box) -> None:
    """Write a models file with `zoo.Misbehaving` as model "m"."""
    box.models_file.write_text(
        f'[models.m]\nbuilder = "python"\nsource = "{zoo.__file__}:misbehaving"\n'
        f'kwargs = {{folder = "{box.folder}"}}\n'
    )


def running(record: JobRecord) -> bool:
    return record.state is JobState.RUNNING and record.progress is not None


def shards_of(num: int, *, seed: int = 0) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [{"x": torch.randn(4, 3, generator=generator)} for _ in range(num)]


def receipt_at(path: Path) -> Receipt:
    """Return the receipt in a result file."""
    return Receipt.model_validate_json(read_header(path).metadata["gradbox"])
