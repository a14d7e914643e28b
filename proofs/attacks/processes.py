"""Models and signals that end processes, and addresses that everybody reaches."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

from proofs.attacks.attack import attack
from proofs.attacks.storage import order
from proofs.attacks.target import Target, own_box
from proofs.chaos.models import write_models
from proofs.chaos.processes import Process
from tests.boxes import ROOT

REPLACED_WITHIN_S = 30.0
RESUMED_WITHIN_S = 25.0


def _only(target: Target, role: str) -> Process:
    (found,) = target.box.processes(role)
    return found


def _next(target: Target, role: str, *, after: int) -> Process:
    """Wait for a process of a role other than one that was there."""
    give_up = time.monotonic() + REPLACED_WITHIN_S
    while time.monotonic() < give_up:
        for process in target.box.processes(role):
            if process.pid != after:
                return process
        time.sleep(0.01)
    raise AssertionError(f"no other {role} within {REPLACED_WITHIN_S:.0f} s")


@attack(
    "process: a device killed while it starts",
    tries="kill -9 of the device process five times, each as soon as there is one",
    must="the same worker starts it again each time, and runs the next job",
    slow=True,
)
def _killed_while_starting(target: Target) -> None:
    with own_box() as own:
        worker = _only(own, "worker")
        device = _only(own, "device")
        for _ in range(5):
            device.signal(signal.SIGKILL)
            device = _next(own, "device", after=device.pid)
        own.still_works()
        assert _only(own, "worker").pid == worker.pid


@attack(
    "model: raises KeyboardInterrupt",
    tries="a model that raises KeyboardInterrupt",
    must="its job fails in its first attempt; the device lives",
    slow=True,
)
def _interrupts(target: Target) -> None:
    with own_box(models=["plain", "hostile"]) as own:
        before = own.devices()
        job = own.job(own.eve, model="hostile", **order(own, 1))
        view = own.ended(own.eve, job)
        assert (view["state"], view["attempts"]) == ("failed", 1), view
        assert own.devices() == before
        own.still_works()


@attack(
    "model: leaves a process behind",
    tries="a model that forks a process into a session of its own; then kill -9 of everything",
    must="what it forked ends too",
    slow=True,
)
def _forks(target: Target) -> None:
    with own_box(models=["plain", "hostile"]) as own:
        before = {process.pid for process in own.box.processes()}
        own.job(own.eve, model="hostile", **order(own, 2))
        give_up = time.monotonic() + 30.0
        while not (left := {p.pid for p in own.box.processes()} - before):
            assert time.monotonic() < give_up, "the model forked nothing"
            time.sleep(0.05)
        parts = own.box.processes("up", "service", "valkey", "worker", "device")
        own.box.kill([process for process in parts if process.pid not in left])
        outlived = own.box.left_over()
        assert not outlived, [process.command for process in outlived]
        own.box.start()
        own.still_works()


@attack(
    "model: crashes at the same shard",
    tries="a model that ends its process by the same signal in every attempt",
    must="the job fails after the second attempt, not the third; others' jobs run",
    slow=True,
)
def _crashes(target: Target) -> None:
    with own_box(models=["plain", "hostile"]) as own:
        worker = _only(own, "worker").pid
        job = own.job(own.eve, model="hostile", **order(own, 4))
        view = own.ended(own.eve, job, within_s=90.0)
        assert view["state"] == "failed", view
        assert view["attempts"] <= 2, view["attempts"]
        assert "SIGSEGV" in view["error"]["detail"]
        own.still_works()
        assert _only(own, "worker").pid == worker


@attack(
    "process: a service that hangs",
    tries="SIGSTOP of the service, for good",
    must="`gradbox up` notices within 45 s, and starts another",
    slow=True,
)
def _hangs(target: Target) -> None:
    with own_box() as own:
        service = _only(own, "service")
        service.signal(signal.SIGSTOP)
        give_up = time.monotonic() + 45.0
        while any(process.pid == service.pid for process in own.box.processes()):
            if time.monotonic() > give_up:
                service.signal(signal.SIGCONT)
                raise AssertionError("the hanging service is still there after 45 s")
            time.sleep(0.2)
        _next(own, "service", after=service.pid)
        own.still_works()


@attack(
    "process: the only worker hangs",
    tries="SIGSTOP of the box's only worker, for good, in the middle of a job",
    must="`gradbox up` starts another; the job goes on within 25 s, in its second attempt",
    slow=True,
)
def _worker_hangs(target: Target) -> None:
    with own_box(models=["plain", "slow"]) as own:
        shards = own.spec(own.ann, model="slow")["inputs"][0]["shards"] * 100
        job = own.job(own.ann, model="slow", inputs=[{"shards": shards}])
        _until_progress(own, job, attempt=1, within_s=30.0)
        worker = _only(own, "worker")
        worker.signal(signal.SIGSTOP)
        begin = time.monotonic()
        _until_progress(own, job, attempt=2, within_s=60.0)
        seconds = time.monotonic() - begin
        assert _only(own, "worker").pid != worker.pid
        assert seconds <= RESUMED_WITHIN_S, f"{seconds:.1f} s, load {os.getloadavg()[0]:.1f}"


def _until_progress(target: Target, job: str, *, attempt: int, within_s: float) -> None:
    give_up = time.monotonic() + within_s
    while True:
        view = target.ann.get(f"/v1/jobs/{job}").json()
        if view["attempts"] == attempt and view["progress"] is not None:
            return
        assert time.monotonic() < give_up, view
        time.sleep(0.05)


@attack(
    "address: reached by others without TLS",
    tries="`gradbox up --host` with an address that is not of this machine alone",
    must="wrong usage, exit code 2, and a word on --insecure and --tls-cert",
)
def _in_the_clear(target: Target) -> None:
    models = write_models(target.folder / "models.toml", {"plain": "proofs.attacks.models:plain"})
    # An address of RFC 5737, which no machine has: nothing listens there, whatever is allowed.
    command = [sys.executable, "-m", "gradbox", "up", "--host", "192.0.2.1", "--port", "0"]
    done = subprocess.run(
        [*command, "--data", str(target.folder / "data"), "--models", str(models)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=500,
    )
    said = done.stdout + done.stderr
    assert done.returncode == 2, said
    assert "--insecure" in said
    assert "--tls-cert" in said
