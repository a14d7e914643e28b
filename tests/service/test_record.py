"""A record's transitions, as pure functions."""

from __future__ import annotations

import pytest

from gradbox.errors import WorkerLost
from gradbox.protocol import JobState, Problem, ProgressView, ResultView
from gradbox_service.jobs import JobRecord
from tests.service.boxes import a_record

RESULT = ResultView(size_bytes=1, sha256="0" * 64)
PROBLEM = Problem.of(WorkerLost("gone"))


def running(**fields: object) -> JobRecord:
    record = a_record(**fields).begin(worker="w", now_s=2.0)
    assert record is not None
    return record


def test_begin_numbers_the_attempt_and_names_the_worker() -> None:
    record = running()
    assert (record.state, record.attempt, record.worker) == (JobState.RUNNING, 1, "w")
    assert record.started_s == record.view().started_s == 2.0


def test_only_a_queued_job_begins() -> None:
    assert running().begin(worker="other", now_s=3.0) is None


def test_finish_keeps_the_result_and_the_time() -> None:
    record = running().finish(attempt=1, result=RESULT, now_s=5.0)
    assert record is not None
    assert (record.state, record.result, record.finished_s) == (JobState.DONE, RESULT, 5.0)


def test_a_result_is_dropped_once() -> None:
    assert running().drop_result(now_s=6.0) is None
    done = running().finish(attempt=1, result=RESULT, now_s=5.0)
    assert done is not None
    dropped = done.drop_result(now_s=6.0)
    assert dropped is not None
    assert (dropped.result_gone_s, dropped.result_bytes) == (6.0, 0)
    assert dropped.drop_result(now_s=7.0) is None


def test_a_job_that_is_done_has_all_its_shards_done() -> None:
    progress = ProgressView(phase="replay", done=3, total=4, seconds_left=1.5)
    noted = running().advance(attempt=1, progress=progress)
    assert noted is not None
    record = noted.finish(attempt=1, result=RESULT, now_s=5.0)
    assert record is not None
    assert record.view().progress == ProgressView(phase="replay", done=4, total=4)
    failed = noted.fail(attempt=1, error=PROBLEM, now_s=5.0)
    assert failed is not None
    assert failed.view().progress == progress


@pytest.mark.parametrize("attempt", [0, 1, 3])
def test_what_another_attempt_says_changes_nothing(attempt: int) -> None:
    lost = running().requeue(attempt=1, reason="it died", now_s=3.0)
    assert lost is not None
    second = lost.begin(worker="other", now_s=4.0)
    assert second is not None
    assert second.attempt == 2
    progress = ProgressView(phase="forward", done=1, total=2)
    assert second.advance(attempt=attempt, progress=progress) is None
    assert second.finish(attempt=attempt, result=RESULT, now_s=5.0) is None
    assert second.fail(attempt=attempt, error=PROBLEM, now_s=5.0) is None
    assert second.cancelled(attempt=attempt, now_s=5.0) is None
    assert second.requeue(attempt=attempt, reason="x", now_s=5.0) is None
    assert second.release(attempt=attempt, now_s=5.0) is None


def test_an_ended_job_stays_as_it_is() -> None:
    record = running().fail(attempt=1, error=PROBLEM, now_s=3.0)
    assert record is not None
    assert record.finish(attempt=1, result=RESULT, now_s=4.0) is None
    assert record.request_cancel(now_s=4.0) is None
    assert record.begin(worker="w", now_s=4.0) is None


def test_the_last_lost_attempt_fails_the_job_with_worker_lost() -> None:
    record = a_record(max_attempts=2)
    for attempt, state in ((1, JobState.QUEUED), (2, JobState.FAILED)):
        begun = record.begin(worker="w", now_s=2.0)
        assert begun is not None
        after = begun.requeue(attempt=attempt, reason="the lease ran out", now_s=3.0)
        assert after is not None
        record = after
        assert record.state is state
    assert record.error is not None
    assert record.error.code == "worker-lost"
    assert "the lease ran out" in record.error.detail


def test_released_attempts_are_not_counted_as_lost() -> None:
    record = a_record(max_attempts=1)
    for attempt in range(1, 5):
        begun = record.begin(worker="w", now_s=2.0)
        assert begun is not None
        assert begun.attempt == attempt
        after = begun.release(attempt=attempt, now_s=3.0)
        assert after is not None
        record = after
    assert (record.state, record.losses) == (JobState.QUEUED, 0)


def test_cancelling_a_queued_job_ends_it_at_once() -> None:
    record = a_record().request_cancel(now_s=2.0)
    assert record is not None
    assert (record.state, record.finished_s) == (JobState.CANCELLED, 2.0)
    assert record.cancel_requested


def test_cancelling_a_running_job_asks_its_worker() -> None:
    record = running().request_cancel(now_s=3.0)
    assert record is not None
    assert (record.state, record.cancel_requested) == (JobState.RUNNING, True)
    assert record.request_cancel(now_s=4.0) is None


@pytest.mark.parametrize("how", ["requeue", "release", "cancelled"])
def test_a_job_that_is_to_be_cancelled_does_not_run_again(how: str) -> None:
    record = running().request_cancel(now_s=3.0)
    assert record is not None
    ended = {
        "requeue": record.requeue(attempt=1, reason="it died", now_s=4.0),
        "release": record.release(attempt=1, now_s=4.0),
        "cancelled": record.cancelled(attempt=1, now_s=4.0),
    }[how]
    assert ended is not None
    assert ended.state is JobState.CANCELLED


def test_a_record_survives_json() -> None:
    progress = ProgressView(phase="replay", done=1, total=2, seconds_left=3.5)
    record = running(name="é", priority=3).advance(attempt=1, progress=progress)
    assert record is not None
    failed = record.fail(attempt=1, error=Problem.of(WorkerLost("x"), hint="y"), now_s=9.0)
    assert failed is not None
    assert JobRecord.from_json(failed.to_json()) == failed
