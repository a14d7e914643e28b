"""How a worker starts, leaves, dies and comes back."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest
import redis
import rq

from gradbox.protocol import JobState
from gradbox_service.fleet import WorkerPresence
from tests.worker.box import (
    Box,
    WorkerProcess,
    is_zombie,
    register_misbehaving,
    running,
    running_box,
    running_worker,
    shards_of,
)


def test_a_worker_killed_with_its_device_takes_its_job_up_again_at_once(
    box: Box, worker: WorkerProcess, living_worker: Callable[[], WorkerProcess]
) -> None:
    box.order("sleep_at_first")
    job = box.submit(box.spec(shards_of(2)))
    box.wait(job, lambda record: record.state is JobState.RUNNING)
    device = worker.child_pid
    worker.process.kill()
    worker.process.wait()
    os.kill(device, signal.SIGKILL)
    (box.folder / "order").unlink()
    assert box.record(job).state is JobState.RUNNING  # its lease holds for longer than this waits
    living_worker()
    record = box.wait(job)
    assert (record.state, record.attempt, record.losses) == (JobState.DONE, 2, 1)


def test_a_worker_asked_to_leave_gives_its_job_back_unharmed_and_leaves_no_process(
    box: Box, worker: WorkerProcess
) -> None:
    box.order("sleep")
    job = box.submit(box.spec(shards_of(1) * 1000))
    box.wait(job, running)
    device = worker.child_pid
    assert worker.stop(signal.SIGTERM) == 0
    record = box.record(job)
    assert (record.state, record.losses) == (JobState.QUEUED, 0)
    assert worker.name not in [other.name for other in box.backing.fleet.workers()]
    assert not Path(f"/proc/{device}").exists()
    box.cancel(job)


def test_a_device_does_not_outlive_its_worker(box: Box, worker: WorkerProcess) -> None:
    box.order("swallow")
    job = box.submit(box.spec(shards_of(1)))
    box.wait(job, running)
    box.cancel(job)
    device = worker.child_pid
    worker.process.kill()
    worker.process.wait()
    deadline = time.monotonic() + 60
    while Path(f"/proc/{device}").exists() and not is_zombie(device):
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.slow  # tests/service/test_dispatch.py has the rule
def test_another_worker_takes_the_job_when_the_lease_has_run_out(tmp_path: Path) -> None:
    with ExitStack() as stack:
        box = stack.enter_context(running_box(tmp_path))
        register_misbehaving(box)
        victim = stack.enter_context(running_worker(box, "--lease-s", "2", name="victim"))
        box.order("sleep")
        job = box.submit(box.spec(shards_of(1) * 1000, timeout_s=600))
        box.wait(job, running)
        heir = stack.enter_context(running_worker(box, name="heir"))
        victim.process.kill()
        victim.process.wait()
        (box.folder / "order").unlink()
        record = box.wait(job)
        assert (record.state, record.worker, record.losses) == (JobState.DONE, "heir", 1)
        assert heir.process.poll() is None


def test_rq_shows_the_worker_and_what_it_does(box: Box, worker: WorkerProcess) -> None:
    def states() -> list[tuple[str, str, list[str]]]:
        found = rq.Worker.all(connection=connection)
        return [(one.name, one.get_state(), one.queue_names()) for one in found]

    with redis.Redis.from_url(box.redis_url) as connection:
        assert states() == [(worker.name, "idle", ["gradbox"])]
        box.order("dawdle")
        job = box.submit(box.spec(shards_of(20)))
        give_up = time.monotonic() + 60
        while states() != [(worker.name, "busy", ["gradbox"])]:
            assert time.monotonic() < give_up
            time.sleep(0.05)
        (box.folder / "order").unlink()
        assert box.wait(job).state is JobState.DONE


def test_a_second_worker_of_the_same_name_is_refused(box: Box, worker: WorkerProcess) -> None:
    second = WorkerProcess(box, name=worker.name)
    assert second.process.wait(timeout=120) == 2
    assert "another --name" in second.log.read_text()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[models.m]\nbuilder = 'hf'", "models.m.source: expected a non-empty string"),
        pytest.param(  # tests/client/test_up.py has a file like it
            "[models.m]\nbuilder = 'python'\nsource = 'none.py:f'",
            "expected a Python file",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_worker_whose_models_cannot_be_built_says_why(
    box: Box, tmp_path: Path, text: str, says: str
) -> None:
    elsewhere = Box(box.folder, box.backing, redis_url=box.redis_url)
    elsewhere.models_file = tmp_path / "models.toml"
    elsewhere.models_file.write_text(text)
    worker = WorkerProcess(elsewhere, name="w3")
    assert worker.process.wait(timeout=120) == 2
    last = worker.log.read_text().splitlines()[-1]
    assert last.startswith("gradbox worker: ")
    assert says in last


def test_a_worker_without_its_redis_says_so(box: Box, tmp_path: Path) -> None:
    lonely = Box(box.folder, box.backing, redis_url=f"unix://{tmp_path}/none.sock")
    lonely.models_file = box.models_file
    worker = WorkerProcess(lonely, name="w4")
    assert worker.process.wait(timeout=120) == 3
    assert "Redis does not answer" in worker.log.read_text()


@pytest.mark.parametrize("options", [[], ["--check"]])
def test_what_is_no_address_of_a_redis_is_wrong_usage(box: Box, options: list[str]) -> None:
    lost = Box(box.folder, box.backing, redis_url="foo")
    lost.models_file = box.models_file
    worker = WorkerProcess(lost, *options, name="w6")
    assert worker.process.wait(timeout=120) == 2
    last = worker.log.read_text().splitlines()[-1]
    assert "such as redis://127.0.0.1:6379, got 'foo'" in last


def test_a_check_tells_a_living_worker_from_none(box: Box) -> None:
    def check() -> int:
        command = [sys.executable, "-m", "gradbox_worker", "--check", "--name", "w5"]
        command += ["--redis-url", box.redis_url, "--data", str(box.folder)]
        return subprocess.run(command, check=False, timeout=120).returncode

    presence = WorkerPresence(name="w5", device="cpu", state="idle", models={"m": "v"})
    box.backing.fleet.announce(presence, ttl_s=600.0)
    assert check() == 0
    box.backing.fleet.retire("w5")
    assert check() == 1
