"""A real worker on a real Redis, whose model crashes, exhausts memory and refuses to stop."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch

from gradbox.protocol import JobState
from tests.worker import zoo
from tests.worker.box import Box, WorkerProcess, running, shards_of


def next_job_is_done(box: Box) -> bool:
    (box.folder / "order").unlink(missing_ok=True)
    return box.wait(box.submit(box.spec(shards_of(2)))).state is JobState.DONE


def test_a_job_gives_the_gradient_that_autograd_gives(box: Box, worker: WorkerProcess) -> None:
    shards = shards_of(3)
    record = box.wait(box.submit(box.spec(shards)))
    assert record.state is JobState.DONE, record.error
    tensors, receipt = box.result(record)

    torch.manual_seed(0)
    model = zoo.Misbehaving(str(box.folder))
    loss = sum((model(shard["x"]) ** 2).sum() for shard in shards)
    loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(tensors[f"grads/{name}"], parameter.grad)
    assert receipt.loss == pytest.approx(loss.item())
    assert (receipt.shards, receipt.attempts, receipt.job) == ({"z": 3}, 1, record.id)
    assert receipt.peak_memory_bytes >= receipt.memory_before_bytes > 0


def test_the_model_stays_loaded_between_jobs(box: Box, worker: WorkerProcess) -> None:
    child = worker.child_pid
    assert next_job_is_done(box)
    loads = worker.device_log.count("loaded m (")
    assert next_job_is_done(box)
    assert worker.child_pid == child
    assert worker.device_log.count("loaded m (") == loads


@pytest.mark.slow  # tests/worker/test_resume.py kills one, too
def test_a_device_process_killed_in_the_middle_runs_the_job_again(
    box: Box, worker: WorkerProcess
) -> None:
    box.order("dawdle")
    job = box.submit(box.spec(shards_of(3)))
    box.wait(job, running)
    os.kill(worker.child_pid, signal.SIGKILL)
    (box.folder / "order").unlink()
    record = box.wait(job)
    assert (record.state, record.attempt, record.losses) == (JobState.DONE, 2, 1)
    assert next_job_is_done(box)


def test_a_death_is_noticed_while_the_models_own_child_lives_on(
    box: Box, worker: WorkerProcess
) -> None:
    box.order("die_leaving_a_child")
    began = time.monotonic()
    job = box.submit(box.spec(shards_of(2)))
    box.wait(job, lambda record: record.losses > 0)
    assert time.monotonic() - began < 50  # the child lives for 60 s
    assert next_job_is_done(box)
    assert box.wait(job).state is JobState.DONE


def test_what_a_device_prints_is_in_its_log(box: Box, worker: WorkerProcess) -> None:
    assert "loaded m" in worker.device_log
    assert "loaded m" not in worker.log.read_text()


@pytest.mark.slow  # tests/worker/test_turn.py has the rule
def test_a_model_that_always_crashes_ends_with_the_reason(box: Box, worker: WorkerProcess) -> None:
    box.order("crash")
    record = box.wait(box.submit(box.spec(shards_of(2))))
    assert (record.state, record.attempt) == (JobState.FAILED, 2)
    assert record.error is not None
    assert record.error.code == "worker-lost"
    assert "the same fault (SIGSEGV in phase 'forward' after 0 of 2" in record.error.detail
    assert "killed by SIGSEGV: a crash in native code" in record.error.detail
    assert next_job_is_done(box)


def test_running_out_of_memory_is_the_jobs_end_and_not_the_workers(
    box: Box, worker: WorkerProcess
) -> None:
    child = worker.child_pid
    box.order("allocate")
    record = box.wait(box.submit(box.spec(shards_of(2))))
    assert (record.state, record.attempt) == (JobState.FAILED, 1)
    assert record.error is not None
    assert record.error.code == "out-of-memory"
    assert "smaller shards" in record.error.detail
    assert next_job_is_done(box)
    assert worker.child_pid == child


@pytest.mark.parametrize("how", ["exit", "interrupt", "raise_what_is_no_exception"])
def test_a_model_that_wants_to_exit_fails_its_job_only(
    box: Box, worker: WorkerProcess, how: str
) -> None:
    child = worker.child_pid
    box.order(how)
    record = box.wait(box.submit(box.spec(shards_of(2))))
    assert (record.state, record.attempt) == (JobState.FAILED, 1)
    assert next_job_is_done(box)
    assert worker.child_pid == child


@pytest.mark.slow  # tests/worker/test_turn.py has the rule; this is the signals that feed it
def test_a_device_killed_at_the_same_shard_again_and_again_is_no_fault_of_the_job(
    box: Box, worker: WorkerProcess
) -> None:
    box.order("sleep_at_first")
    job = box.submit(box.spec(shards_of(2)))
    for attempt in (1, 2):
        box.wait(job, lambda record, n=attempt: running(record) and record.attempt == n)
        os.kill(worker.child_pid, signal.SIGKILL)
    box.wait(job, lambda record: record.attempt == 3)
    (box.folder / "order").unlink()
    assert box.wait(job).state is JobState.DONE


def test_a_cancelled_job_stops_within_a_shard_and_the_model_stays(
    box: Box, worker: WorkerProcess
) -> None:
    assert next_job_is_done(box)  # the model is loaded
    child = worker.child_pid
    loads = worker.device_log.count("loaded m (")
    box.order("dawdle")
    job = box.submit(box.spec(shards_of(1) * 500))  # of 0.3 s, longer than anything here waits
    box.wait(job, running)
    box.cancel(job)
    assert box.wait(job).state is JobState.CANCELLED
    assert next_job_is_done(box)
    assert worker.child_pid == child
    assert worker.device_log.count("loaded m (") == loads


def test_a_cancelled_job_that_does_not_stop_is_killed_after_the_grace(
    box: Box, worker: WorkerProcess
) -> None:
    child = worker.child_pid
    box.order("swallow")
    job = box.submit(box.spec(shards_of(2)))
    box.wait(job, running)
    box.cancel(job)
    assert box.wait(job).state is JobState.CANCELLED
    assert next_job_is_done(box)
    assert worker.child_pid != child


def test_a_job_cancelled_while_its_turn_waits_is_not_run(box: Box, worker: WorkerProcess) -> None:
    box.order("sleep")
    first = box.submit(box.spec(shards_of(1) * 20))
    second = box.submit(box.spec(shards_of(1, seed=2)))
    box.wait(first, running)
    box.cancel(second)
    assert next_job_is_done(box)
    assert (box.record(second).state, box.record(second).attempt) == (JobState.CANCELLED, 0)


@pytest.mark.slow  # it is killed as one that was cancelled is
def test_a_time_limit_ends_code_that_resists_it(box: Box, worker: WorkerProcess) -> None:
    box.order("swallow")
    record = box.wait(box.submit(box.spec(shards_of(2), timeout_s=0.5)))
    assert record.state is JobState.FAILED
    assert record.error is not None
    assert record.error.code == "job-timed-out"
    assert next_job_is_done(box)


def test_the_wrong_version_of_a_model_is_refused(box: Box, worker: WorkerProcess) -> None:
    record = box.wait(box.submit(box.spec(shards_of(1)), version="0" * 64))
    assert record.error is not None
    assert record.error.code == "unknown-model"
