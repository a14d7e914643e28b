"""The disk: full of blobs, of one result, of logs, of somebody else's files."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import torch
from safetensors.torch import save

from proofs.attacks.attack import attack
from proofs.attacks.graphs import call
from proofs.attacks.target import NODE_Z, Target, graph_loss, own_box
from proofs.chaos.disk import filled, free_bytes
from tests.boxes import ROOT

MIB = 2**20
RESERVE = {"GRADBOX_DISK_RESERVE_BYTES": str(128 * MIB)}
LARGEST_LOGS_BYTES = 32 * MIB
WAIT = (503, 507)


@attack(
    "disk: a result larger than the disk",
    tries="dense rows of 800 MB where 600 MB of 1 GB are free",
    must="storage-full with the numbers, before any of it is written",
    slow=True,
)
def _large_result(target: Target) -> None:
    with own_box(models=["plain", "wide"], environment=RESERVE, disk_bytes=1024 * MIB) as own:
        (own.box.data / "ballast").write_bytes(bytes(400 * MIB))
        free = free_bytes(own.box.data)
        rows = call("sum", NODE_Z, 1, op="call_method", name="rows")
        blob = own.upload(own.eve, {"0": torch.ones(12, 3)})
        job = own.job(
            own.eve,
            computation="per_sample_gradient",
            model="wide",
            inputs=[{"shards": [{"blob": blob}]}],
            loss=graph_loss(rows),
            form="dense",
        )
        with _watched(lambda: -free_bytes(own.box.data)) as fullest:
            view = own.ended(own.eve, job)
        assert view["state"] == "failed", view
        assert view["error"]["type"].endswith("storage-full"), view["error"]
        taken = free + max(fullest)
        assert taken < 64 * MIB, f"{taken / MIB:.0f} MB were taken meanwhile"
        own.still_works()


@attack(
    "disk: filled with blobs",
    tries="blobs of 16 MB until one is refused, on a disk of 512 MB",
    must="507 while the reserve is still free; others list, post and compute, tokens are revoked",
    slow=True,
)
def _blobs(target: Target) -> None:
    with own_box(environment=RESERVE, disk_bytes=512 * MIB) as own:
        refused = None
        for number in range(40):
            data = save({"x": torch.full((4 * MIB,), float(number))})
            answer = own.eve.put(f"/v1/blobs/{hashlib.sha256(data).hexdigest()}", content=data)
            if answer.status_code != 201:
                refused = answer
                break
        assert refused is not None
        assert refused.status_code == 507, refused.text
        assert free_bytes(own.box.data) > 64 * MIB
        own.still_works()
        assert _revoked(own, "eve")
        assert own.eve.get("/v1/jobs").status_code == 401


@attack(
    "disk: full of others' files",
    tries="every byte of the data folder's disk taken for 6 s, while a job runs",
    must="posts are answered 503 or 507 with Retry-After, never 500; the job ends in its first "
    "attempt; no process of the box ends; a token is not revoked meanwhile and the command says "
    "so, and is revoked at once afterwards",
    slow=True,
)
def _full(target: Target) -> None:
    with own_box(models=["slow"], disk_bytes=512 * MIB, environment=RESERVE) as own:
        spec = own.spec(own.eve, model="slow")
        shards = [{"shards": spec["inputs"][0]["shards"] * 100}]
        job = own.job(own.ann, model="slow", inputs=shards)
        before = {process.pid for process in own.box.processes()}
        answers = []
        with filled(own.box.data):
            give_up = time.monotonic() + 6.0
            while time.monotonic() < give_up:
                answers.append(own.eve.post("/v1/jobs", json=spec))
                time.sleep(0.2)
            assert not _revoked(own, "eve")
        assert _revoked(own, "eve")
        assert own.eve.get("/v1/jobs").status_code == 401
        statuses = {answer.status_code for answer in answers}
        assert statuses <= {202, *WAIT}, statuses
        assert statuses & set(WAIT), "nothing was refused: the disk was not full"
        assert all("retry-after" in a.headers for a in answers if a.status_code in WAIT)
        view = own.ended(own.ann, job)
        assert (view["state"], view["attempts"]) == ("done", 1), view
        assert {process.pid for process in own.box.processes()} == before


@attack(
    "disk: a model that prints a gigabyte",
    tries="a model that writes 1 GB to its standard output",
    must="the logs of the box never take more than 32 MB, while it prints neither",
    slow=True,
)
def _printing(target: Target) -> None:
    with own_box(models=["plain", "hostile"]) as own:
        logs = own.box.data / "logs"
        job = own.job(own.eve, model="hostile", **order(own, 3))
        with _watched(lambda: sum(path.stat().st_size for path in logs.iterdir())) as sizes:
            view = own.ended(own.eve, job, within_s=120.0)
        assert view["state"] == "done", view
        assert max(sizes) <= LARGEST_LOGS_BYTES, f"the logs took {max(sizes) / MIB:.0f} MB"
        assert max(sizes) > MIB, "nothing was printed"


@contextmanager
def _watched(measure: Callable[[], int]) -> Iterator[list[int]]:
    """Measure something again and again, in a thread; gives the list of what was found."""
    found: list[int] = []
    over = threading.Event()

    def watch() -> None:
        while not over.wait(0.002):
            with suppress(FileNotFoundError):  # a log that was put aside meanwhile
                found.append(measure())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield found
    finally:
        over.set()
        watcher.join()


def order(target: Target, number: int) -> dict[str, object]:
    """Return the inputs by which the hostile model gets an order."""
    blob = target.upload(target.eve, {"0": torch.full((2, 3), float(number))})
    return {"inputs": [{"shards": [{"blob": blob}]}]}


def _revoked(target: Target, owner: str) -> bool:
    """Revoke a token by the command line, and return whether that says it did."""
    command = [sys.executable, "-m", "gradbox", "tokens", "revoke", owner]
    data = ["--data", str(target.box.data)]
    done = subprocess.run([*command, *data], cwd=ROOT, capture_output=True, check=False)
    return done.returncode == 0
