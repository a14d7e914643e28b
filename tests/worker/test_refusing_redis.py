"""A Redis that takes nothing for a while costs no worker and no attempt, nor does a full one."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from gradbox.protocol import JobState
from gradbox_service.database.connection import connect
from gradbox_worker.turns.presence import PRESENCE_TTL_S
from gradbox_worker.turns.worker import HEARTBEAT_S
from tests.worker.box import (
    Box,
    WorkerProcess,
    register_misbehaving,
    running,
    running_box,
    running_worker,
    shards_of,
)

LEASE_S = 2.0
REFUSED = "Redis refuses for now, waiting"


@pytest.fixture(scope="module")
def box(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Box]:
    with running_box(tmp_path_factory.mktemp("refusing")) as box:
        register_misbehaving(box)
        yield box


@contextmanager
def refusing(redis_url: str) -> Iterator[None]:
    """Let every change be refused, as on a full disk."""
    with set_to(redis_url, "min-replicas-to-write", 1):
        yield


@contextmanager
def full(redis_url: str) -> Iterator[None]:
    """Let Redis have more memory than it may."""
    with set_to(redis_url, "maxmemory", 1):
        yield


@contextmanager
def set_to(redis_url: str, setting: str, value: int) -> Iterator[None]:
    connection = connect(redis_url)
    connection.config_set(setting, value)
    try:
        yield
    finally:
        connection.config_set(setting, 0)
        connection.close()


def wait_until_refused(worker: WorkerProcess) -> None:
    """Wait until the worker has said once more that Redis refuses."""
    before, give_up = worker.log.read_text().count(REFUSED), time.monotonic() + 120
    while worker.log.read_text().count(REFUSED) == before:
        assert worker.process.poll() is None, worker.log.read_text()
        assert time.monotonic() < give_up, worker.log.read_text()
        time.sleep(0.05)


@pytest.fixture(scope="module")
def worker(box: Box) -> Iterator[WorkerProcess]:
    """A worker that was started while Redis refused to take its name."""
    with refusing(box.redis_url):
        worker = WorkerProcess(box, "--lease-s", str(LEASE_S))
        wait_until_refused(worker)
    yield worker
    if worker.process.poll() is None:
        worker.stop()


@pytest.fixture(scope="module")
def version(box: Box, worker: WorkerProcess) -> str:
    """The version of the model that the worker offers."""
    worker.wait_until_ready()
    (found,) = box.backing.fleet.workers()
    return found.models["m"]


def test_a_worker_starts_as_soon_as_redis_takes_its_name(worker: WorkerProcess) -> None:
    worker.wait_until_ready()


def test_a_job_that_runs_and_ends_while_redis_refuses_loses_no_attempt(
    box: Box, worker: WorkerProcess
) -> None:
    worker.wait_until_ready()
    box.order("dawdle")
    job = box.submit(box.spec(shards_of(8)))
    box.wait(job, running)
    device = worker.child_pid
    with refusing(box.redis_url):
        (box.folder / "order").unlink()
        time.sleep(2 * LEASE_S)
        assert box.record(job).state is JobState.RUNNING
    record = box.wait(job)
    assert (record.state, record.attempt, record.losses) == (JobState.DONE, 1, 0)
    assert (worker.process.poll(), worker.child_pid) == (None, device)


def test_an_idle_worker_waits_and_takes_the_next_job(box: Box, worker: WorkerProcess) -> None:
    worker.wait_until_ready()
    with refusing(box.redis_url):
        wait_until_refused(worker)
    worker.wait_until_ready()
    record = box.wait(box.submit(box.spec(shards_of(1))))
    assert (record.state, record.attempt) == (JobState.DONE, 1)


def test_jobs_that_wait_are_begun_while_redis_is_full(
    box: Box, worker: WorkerProcess, version: str
) -> None:
    worker.wait_until_ready()
    jobs = [box.submit(box.spec(shards_of(1), seed=seed)) for seed in range(3)]
    with full(box.redis_url):
        records = [box.wait(job) for job in jobs]
    assert {record.model_version for record in records} == {version}
    for record in records:
        assert (record.state, record.attempt, record.losses) == (JobState.DONE, 1, 0)


def test_a_job_ends_and_another_is_given_back_while_redis_is_full(
    box: Box, worker: WorkerProcess
) -> None:
    worker.wait_until_ready()
    box.order("dawdle")
    ends = box.submit(box.spec(shards_of(40)))
    box.wait(ends, running)
    with full(box.redis_url):
        time.sleep(HEARTBEAT_S + 2 * LEASE_S)  # the worker's own heartbeat is refused meanwhile
        assert box.record(ends).state is JobState.RUNNING
        assert [w.state for w in box.backing.fleet.workers()] == ["busy"]
        (box.folder / "order").unlink()
        record = box.wait(ends)
        time.sleep(PRESENCE_TTL_S + 1)
        assert [w.state for w in box.backing.fleet.workers()] == ["idle"]
    assert (record.state, record.attempt, record.losses) == (JobState.DONE, 1, 0)
    box.order("dawdle")
    stays = box.submit(box.spec(shards_of(8)))
    box.wait(stays, running)
    with full(box.redis_url):
        assert worker.stop() == 0
        record = box.record(stays)
    assert (record.state, record.losses) == (JobState.QUEUED, 0)


@pytest.mark.slow  # others start while Redis refuses all, and begin jobs while it is full
def test_a_worker_that_starts_while_redis_is_full_begins_a_job(
    box: Box, worker: WorkerProcess, version: str
) -> None:
    if worker.process.poll() is None:
        worker.stop()
    (box.folder / "order").unlink(missing_ok=True)
    job = box.submit(box.spec(shards_of(1)), version=version)
    with full(box.redis_url), running_worker(box, name="later"):
        record = box.wait(job)
    assert (record.state, record.attempt, record.losses) == (JobState.DONE, 1, 0)
