"""Users: each goes from problem to problem through the proxy until the faults are over."""

from __future__ import annotations

import hashlib
import random
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import httpx
import torch
from safetensors.torch import save

from gradbox import (
    GradboxError,
    GradClient,
    GradResult,
    JobCancelled,
    Retry,
    ServiceUnavailable,
    StorageFull,
    WorkerLost,
)
from gradbox.computations import Computation
from proofs.chaos.ledger import Accepted, Ledger, Witness
from proofs.chaos.problems import NUM_VARIANTS, PROBLEMS, Wrong

# Longer than the box is ever away, so that giving up is a failure of the box.
PATIENCE = Retry(patience_s=120.0, longest_pause_s=1.0)
RESULT_WITHIN_S = 150.0
CANCEL_SHARE = 0.06
TWICE_SHARE = 0.08
STORAGE_PAUSE_S = 0.5


class Session(threading.Thread):
    """One user at work."""

    def __init__(
        self, name: str, *, owner: str, token: str, url: str, seed: str, ledger: Ledger
    ) -> None:
        super().__init__(name=name, daemon=True)
        self._owner = owner
        self._ledger = ledger
        self._rng = random.Random(seed)
        self._over = threading.Event()
        # Whether the session ended by itself, and not by an exception that nobody expects.
        self.ended_well = False
        self._witness = Witness(ledger)
        self._client = GradClient(url, token, transport=self._witness, retry=PATIENCE)
        self._http = httpx.Client(
            base_url=url,
            transport=self._witness,
            headers={"Authorization": f"Bearer {token}"},
            timeout=30.0,
        )
        self._count = 0

    def finish(self) -> None:
        """Begin no further problem."""
        self._over.set()

    def run(self) -> None:
        while not self._over.is_set():
            self._count += 1
            problem = self._rng.choice(list(PROBLEMS))
            variant = self._rng.randrange(NUM_VARIANTS)
            draw = self._rng.random()
            if draw < TWICE_SHARE:
                self._told("posted twice", self._post_twice)
            else:
                cancels = draw > 1 - CANCEL_SHARE
                self._told(problem, partial(self._solve, problem, variant, cancels=cancels))
        self.ended_well = True

    def _told(self, problem: str, solve: Callable[[], None]) -> None:
        """Solve a problem, and write down how it ended."""
        where = f"{self.name}, problem {self._count} ({problem})"
        try:
            solve()
        except Wrong as error:
            self._ledger.wrong.append(f"{where}: {error}")
        except JobCancelled:
            self._ledger.num_cancelled += 1
        except WorkerLost:  # whether it was tried often enough is judged by the job's record
            self._ledger.num_attempts_lost += 1
        except StorageFull as error:
            self._refused_for_storage(where, error)
        except TimeoutError as error:
            self._ledger.stuck.append(f"{where}: {error}")
        except GradboxError as error:
            if isinstance(error, ServiceUnavailable) and self._ledger.storage_was_full:
                self._refused_for_storage(where, error)
            else:
                self._ledger.unexpected.append(f"{where}: {type(error).__name__}: {error}")
        else:
            self._ledger.num_right += 1

    def _refused_for_storage(self, where: str, error: GradboxError) -> None:
        if self._ledger.storage_was_full:
            self._ledger.num_refused_for_storage += 1
            self._over.wait(STORAGE_PAUSE_S)
        else:
            self._ledger.unexpected.append(f"{where}: {error}, with room on the disk")

    def _solve(self, problem: str, variant: int, *, cancels: bool) -> None:
        step = 0

        def submit(computation: Computation) -> Told:
            nonlocal step
            step += 1
            name = f"{self.name}-{self._count}-{step}"
            self._ledger.submitted.add(name)
            # The name is in the spec, so no two jobs are the same.
            job = self._client.submit(replace(computation, name=name))
            self._ledger.accepted.append(Accepted(job.id, name, self._owner, problem))
            if cancels:
                time.sleep(self._rng.uniform(0, 0.5))
                self._ledger.cancelled.add(name)
                job.cancel()
            return Told(job)

        PROBLEMS[problem](submit, variant)

    def _post_twice(self) -> None:
        """Post one body under one key again and again until two answers came: one job."""
        name = f"{self.name}-{self._count}-1"
        self._ledger.submitted.add(name)
        digest, spec = _small_job(name)
        path = f"/v1/blobs/{digest[0]}"
        self._insist(lambda: self._http.put(path, content=digest[1]))
        key = {"Idempotency-Key": str(uuid.uuid4())}
        ids = {
            str(self._insist(lambda: self._http.post("/v1/jobs", json=spec, headers=key))["id"])
            for _ in range(2)
        }
        for job_id in ids:
            self._ledger.accepted.append(Accepted(job_id, name, self._owner, "posted twice"))
        if len(ids) > 1:
            self._ledger.doubled.append(f"{name}: one key gave the jobs {sorted(ids)}")

    def _insist(self, send: Callable[[], httpx.Response]) -> Any:
        """Send until an answer comes that is not "try again"."""
        give_up = time.monotonic() + PATIENCE.patience_s
        while time.monotonic() < give_up:
            try:
                answer = send()
            except httpx.TransportError:
                time.sleep(0.1)
                continue
            if answer.status_code in (503, 507):
                time.sleep(STORAGE_PAUSE_S)
                continue
            if answer.is_success:
                return answer.json()
            if answer.status_code >= 500:  # the ledger has it
                time.sleep(0.1)
                continue
            raise ServiceUnavailable(f"answered {answer.status_code}: {answer.text[:300]}")
        raise TimeoutError(f"no answer within {PATIENCE.patience_s:.0f} s")


class Told:
    """A job that was accepted."""

    def __init__(self, job: Any) -> None:
        self.job = job

    def result(self) -> GradResult:
        found: GradResult = self.job.result(RESULT_WITHIN_S, progress=False)
        return found


def _small_job(name: str) -> tuple[tuple[str, bytes], dict[str, Any]]:
    data = save({"0": torch.ones(2, 5, dtype=torch.float64)})
    digest = hashlib.sha256(data).hexdigest()
    total = [
        {"op": "placeholder", "name": "z", "target": "z"},
        {"op": "call_method", "name": "s", "target": "sum", "args": [{"node": "z"}]},
        {"op": "output", "name": "out", "target": "output", "args": [{"node": "s"}]},
    ]
    spec = {
        "computation": "gradient",
        "model": "mlp",
        "inputs": [{"shards": [{"blob": digest}]}],
        "loss": {"kind": "graph", "function": {"graph": {"nodes": total}}},
        "name": name,
    }
    return (digest, data), spec
