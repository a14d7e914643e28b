"""What becomes of the job that a device process held when it ended, whoever ended it."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from gradbox.protocol import JobState
from gradbox_service.jobs import JobRecord, Records, Turn
from gradbox_worker.device import DeviceSettings
from gradbox_worker.device.exits import Exit
from gradbox_worker.device.last_step import JobStep
from gradbox_worker.turns.supervision import AttemptWatch, Patience
from gradbox_worker.turns.worker import Worker
from tests.valkey import empty_backing
from tests.worker.box import Box, shards_of

KILLED = Exit("it was killed by SIGKILL", fault=None)


class Ended:
    """Stands for a device process that has ended."""

    def __init__(self, last_step: JobStep | None = None) -> None:
        self.last_step = last_step


@pytest.fixture
def box(tmp_path: Path) -> Box:
    return Box(tmp_path, empty_backing(tmp_path))


def worker_of(box: Box) -> Worker:
    backing = box.backing
    worker = Worker(
        backing.records._redis,
        name="w",
        redis_url="",
        settings=DeviceSettings(box.models_file, box.folder),
        results=backing.results,
        patience=Patience(cancel_grace_s=0.0),
    )
    worker._device = Ended()  # type: ignore[assignment]
    return worker


def begun(box: Box) -> str:
    job = box.submit(box.spec(shards_of(1)))

    def begin(record: JobRecord) -> JobRecord | None:
        return record.begin(worker="w", now_s=time.time())

    assert box.backing.records.update(job, begin, lease_s=60.0, holder="w") is not None
    return job


def watch_of(box: Box, job: str) -> AttemptWatch:
    return AttemptWatch(box.backing.records, Turn(job, 1), patience=Patience())


def test_a_process_that_dies_loses_the_attempt_that_it_held_and_once(box: Box) -> None:
    job, worker = begun(box), worker_of(box)
    for _ in range(2):
        worker._count(KILLED)
    assert (box.record(job).state, box.record(job).losses) == (JobState.QUEUED, 1)
    assert box.backing.turns.held("w") is None


def test_a_fault_is_noted_with_its_step(box: Box) -> None:
    job, worker = begun(box), worker_of(box)
    worker._device = Ended(JobStep("replay", 2, 5))  # type: ignore[assignment]
    worker._count(Exit("it was killed by SIGSEGV", fault="SIGSEGV"))
    assert box.record(job).last_fault == "SIGSEGV in phase 'replay' after 2 of 5 steps"


def test_a_job_that_had_ended_is_left_as_it_is(box: Box) -> None:
    job, worker = begun(box), worker_of(box)
    box.backing.records.update(job, lambda r: r.cancelled(attempt=1, now_s=time.time()), holder="w")
    worker._count(KILLED)
    assert (box.record(job).state, box.record(job).losses) == (JobState.CANCELLED, 0)


def test_a_job_that_was_given_to_another_worker_is_left_to_it(box: Box) -> None:
    job, worker = begun(box), worker_of(box)
    records: Records = box.backing.records
    records.update(job, lambda r: r.requeue(attempt=1, reason="x", now_s=time.time()))
    records.update(job, lambda r: r.begin(worker="other", now_s=time.time()), holder="other")
    worker._count(KILLED)
    assert (box.record(job).state, box.record(job).losses) == (JobState.RUNNING, 1)
    assert box.backing.turns.held("w") is None
    assert box.backing.turns.held("other") == Turn(job, 2)


def test_a_cancelled_job_whose_process_had_to_be_killed_is_cancelled(box: Box) -> None:
    job, worker = begun(box), worker_of(box)
    box.cancel(job)
    worker._watch = watch_of(box, job)
    worker._watch.look(None)
    worker._killed = Turn(job, 1)
    worker._count(KILLED)
    assert box.record(job).state is JobState.CANCELLED


def test_a_kill_that_met_the_next_job_costs_that_one_nothing(box: Box) -> None:
    worker = worker_of(box)
    worker._killed = Turn("ended-meanwhile", 1)
    job = begun(box)
    worker._count(KILLED)
    assert (box.record(job).state, box.record(job).losses) == (JobState.QUEUED, 0)


def test_a_worker_that_leaves_gives_back_what_its_killed_process_held(box: Box) -> None:
    job, worker = begun(box), worker_of(box)
    worker.leaving = True
    worker._count(KILLED)
    assert (box.record(job).state, box.record(job).losses) == (JobState.QUEUED, 0)
