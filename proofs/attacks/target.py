"""The box that attacks are tried on, and what an attacker and the victim have in their hands."""

from __future__ import annotations

import hashlib
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import torch
from safetensors.torch import save

from gradbox import GradClient
from proofs.chaos.box import Box
from proofs.chaos.disk import small_disk
from tests.boxes import ROOT

WAIT_S = 120.0
X = torch.ones(2, 3)
Z = {"op": "placeholder", "name": "z", "target": "z"}
NODE_Z = {"node": "z"}
SUM = {"op": "call_method", "name": "s", "target": "sum", "args": [NODE_Z]}
MODELS = {
    "plain": "proofs.attacks.models:plain",
    "slow": "proofs.attacks.models:slow",
    "hostile": "proofs.attacks.models:hostile",
    "words": "proofs.attacks.models:words",
    "wide": "proofs.attacks.models:wide",
}


class NotHere(Exception):
    """The attack cannot be tried on this machine."""


class Target:
    """A box with two users: ann, who works there, and eve, who attacks.

    Attributes:
        box: the running box.
        folder: an empty folder for whatever the attack writes.
    """

    def __init__(self, box: Box, folder: Path) -> None:
        self.box = box
        self.folder = folder
        self.ann = box.http("ann", timeout_s=300.0)
        self.eve = box.http("eve", timeout_s=300.0)

    @property
    def url(self) -> str:
        return self.box.url

    def close(self) -> None:
        self.ann.close()
        self.eve.close()

    def client(self, owner: str = "eve") -> GradClient:
        """Return a client of the box."""
        return GradClient(self.url, self.box.tokens[owner])

    def admin(self) -> httpx.Client:
        """Return plain HTTP with the token that `gradbox up` wrote for the box's owner."""
        headers = {"Authorization": f"Bearer {self.box.own_token()}"}
        return httpx.Client(base_url=self.url, headers=headers, trust_env=False, timeout=60.0)

    def send(self, data: bytes, *, first_s: float = 30.0, read_s: float = 0.3) -> bytes:
        """Send raw bytes, and return what is answered until it closes or falls silent.

        Args:
            first_s: how long to wait for the first byte; `read_s` for each further one.
        """
        with socket.create_connection(("127.0.0.1", self.box.port)) as connection:
            connection.settimeout(first_s)
            answer = b""
            try:
                connection.sendall(data)
                while piece := connection.recv(65536):
                    answer += piece
                    connection.settimeout(read_s)
            except (TimeoutError, ConnectionError):
                pass
            return answer

    def command(
        self, *arguments: str, owner: str = "eve", within_s: float = 500.0
    ) -> subprocess.CompletedProcess[str]:
        """Run `gradbox` as a user."""
        environment = {"GRADBOX_URL": self.url, "GRADBOX_TOKEN": self.box.tokens[owner]}
        return subprocess.run(
            [sys.executable, "-m", "gradbox", *arguments],
            capture_output=True,
            text=True,
            cwd=ROOT,
            env=os.environ | environment,
            timeout=within_s,
        )

    # --- what a user does ------------------------------------------------------------------------

    def upload(self, by: httpx.Client, tensors: Mapping[str, torch.Tensor]) -> str:
        """Put a blob on the box, and return its digest."""
        data = save(dict(tensors))
        digest = hashlib.sha256(data).hexdigest()
        answer = by.put(f"/v1/blobs/{digest}", content=data)
        assert answer.status_code in (200, 201), answer.text
        return digest

    def spec(self, by: httpx.Client, **changes: Any) -> dict[str, Any]:
        """Return a small job that is right, with the blobs that it needs on the box."""
        blob = self.upload(by, {"0": X})
        return {
            "computation": "gradient",
            "model": "plain",
            "inputs": [{"shards": [{"blob": blob}]}],
            "loss": graph_loss(SUM),
            **changes,
        }

    def post(self, by: httpx.Client, **changes: Any) -> httpx.Response:
        """Post that job."""
        return by.post("/v1/jobs", json=self.spec(by, **changes))

    def job(self, by: httpx.Client, **changes: Any) -> str:
        """Post that job, which must be accepted, and return its id."""
        answer = self.post(by, **changes)
        assert answer.status_code == 202, answer.text
        return str(answer.json()["id"])

    def ended(self, by: httpx.Client, job_id: str, *, within_s: float = WAIT_S) -> dict[str, Any]:
        """Wait until a job has ended, and return it."""
        give_up = time.monotonic() + within_s
        while time.monotonic() < give_up:
            answer = by.get(f"/v1/jobs/{job_id}")
            assert answer.status_code == 200, answer.text
            view: dict[str, Any] = answer.json()
            if view["state"] in ("done", "failed", "cancelled"):
                return view
            time.sleep(0.02)
        raise AssertionError(f"job {job_id} is still {view['state']} after {within_s:.0f} s")

    # --- what must hold --------------------------------------------------------------------------

    def devices(self) -> dict[str, int]:
        """Return the device processes by worker."""
        return {process.name: process.pid for process in self.box.processes("device")}

    def still_works(self, *, within_s: float = WAIT_S) -> None:
        """Have ann run a job: whatever eve did, the box is there for the others."""
        view = self.ended(self.ann, self.job(self.ann), within_s=within_s)
        assert view["state"] == "done", view

    def lives(self) -> float:
        """Return the seconds that /livez takes on a new connection."""
        begin = time.monotonic()
        answer = httpx.get(f"{self.url}/livez", trust_env=False, timeout=30.0)
        assert answer.status_code == 200
        return time.monotonic() - begin

    def slowest_while(self, send: Callable[[], object]) -> float:
        """Return the slowest answer of /livez while something is sent."""
        sender = threading.Thread(target=send, daemon=True)
        sender.start()
        slowest = self.lives()
        while sender.is_alive():
            slowest = max(slowest, self.lives())
            time.sleep(0.02)
        return slowest


def refused(answer: httpx.Response, code: str | None = None, *, status: int = 422) -> str:
    """Check that a request was refused as a problem, and return the detail."""
    assert answer.status_code == status, f"{answer.status_code}: {answer.text[:500]}"
    problem = answer.json()
    assert code is None or problem["type"] == f"urn:gradbox:problem:{code}", problem
    assert "Traceback" not in answer.text
    return str(problem["detail"])


def graph_loss(*nodes: Mapping[str, Any], returns: Any = None) -> dict[str, Any]:
    """Return a traced loss of z, whose last node is returned."""
    last = {"node": nodes[-1]["name"]} if returns is None else returns
    output = {"op": "output", "name": "output", "target": "output", "args": [last]}
    return {"kind": "graph", "function": {"graph": {"nodes": [Z, *nodes, output]}}}


@contextmanager
def own_box(
    *,
    models: Sequence[str] = ("plain",),
    arguments: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    disk_bytes: int | None = None,
) -> Iterator[Target]:
    """Run a box of one worker with some of `MODELS`, and stop it.

    Args:
        arguments: more of `gradbox up`; `environment` likewise.
        disk_bytes: the size of a disk of its own for the data folder.

    Raises:
        NotHere: this user may not mount one.
    """
    with ExitStack() as stack:
        # Short, so that the socket of Redis is in the data folder.
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gradbox-attacks-")))
        if disk_bytes and not stack.enter_context(small_disk(folder / "data", disk_bytes)):
            raise NotHere("mounting a small disk takes root, this user may not")
        box = Box(
            folder,
            num_workers=1,
            models={name: MODELS[name] for name in models},
            arguments=arguments,
            environment=environment,
        )
        stack.callback(box.left_over)
        stack.callback(box.stop)
        box.start()
        box.make_tokens(["ann", "eve"])
        scratch = folder / "scratch"
        scratch.mkdir()
        found = Target(box, scratch)
        stack.callback(found.close)
        yield found
