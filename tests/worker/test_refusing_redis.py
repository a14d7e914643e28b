"""A Redis that takes nothing for a while costs no worker and no attempt."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from gradbox.protocol import JobState
from gradbox_service.jobs import connect
from tests.worker.box import (
    Box,
    WorkerProcess,
    register_misbehaving,
    running,
    running_box,
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
    """Let every change that takes memory be refused, as on a full disk."""
    connection = connect(redis_url)
    connection.config_set("maxmemory", 1)
    try:
        yield
    finally:
        connection.config_set("maxmemory", 0)
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
