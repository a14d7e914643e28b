"""What a model starts ends with the device process, whoever is killed."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from gradbox_worker.device.descendants import MARK, end_descendants
from tests.worker.box import Box, WorkerProcess, is_zombie, running, shards_of

NUM_CHILDREN = 3  # of zoo.leave_children


def kill_device(worker: WorkerProcess) -> None:
    os.kill(worker.child_pid, signal.SIGKILL)


def kill_worker(worker: WorkerProcess) -> None:
    worker.process.kill()


def kill_worker_and_device(worker: WorkerProcess) -> None:
    device = worker.child_pid
    worker.process.kill()
    os.kill(device, signal.SIGKILL)


def kill_device_and_worker(worker: WorkerProcess) -> None:
    os.kill(worker.child_pid, signal.SIGKILL)
    worker.process.kill()


def stop_worker(worker: WorkerProcess) -> None:
    worker.process.terminate()


@pytest.mark.parametrize(
    "how",
    [
        pytest.param(kill_device, marks=pytest.mark.slow),
        pytest.param(kill_worker, marks=pytest.mark.slow),
        kill_worker_and_device,
        pytest.param(kill_device_and_worker, marks=pytest.mark.slow),
        pytest.param(stop_worker, marks=pytest.mark.slow),
    ],
    ids=lambda how: how.__name__,
)
def test_children_of_a_model_end_with_its_device(
    box: Box, worker: WorkerProcess, how: Callable[[WorkerProcess], None]
) -> None:
    box.order("leave_children_and_sleep")
    job = box.submit(box.spec(shards_of(1) * 200))
    box.wait(job, lambda record: running(record) and (box.folder / "children").exists())
    children = [int(pid) for pid in (box.folder / "children").read_text().split()]
    assert len(children) == NUM_CHILDREN
    assert all(lives(child) for child in children)
    how(worker)
    deadline = time.monotonic() + 50  # the children live for 60 s
    while any(lives(child) for child in children):
        assert time.monotonic() < deadline, children
        time.sleep(0.02)
    box.cancel(job)


def test_nobody_else_is_ended() -> None:
    with subprocess.Popen(["sleep", "60"], start_new_session=True) as other:
        mark = secrets.token_hex(8)
        command = [sys.executable, "-c", "import time; time.sleep(60)"]
        with subprocess.Popen(command, env={MARK: mark}, start_new_session=True) as marked:
            wait_for_mark(marked.pid, mark)
            end_descendants(session=marked.pid, mark=mark)
            assert marked.wait(50) == -signal.SIGKILL
        assert other.poll() is None
        # The number of a session that is over may belong to somebody new.
        end_descendants(session=other.pid, mark=mark)
        assert other.poll() is None
        other.kill()


def wait_for_mark(pid: int, mark: str) -> None:
    """Wait until the process runs its own program, whose environment has the mark."""
    deadline = time.monotonic() + 60
    while mark.encode() not in Path(f"/proc/{pid}/environ").read_bytes():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def lives(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists() and not is_zombie(pid)
