"""Use of the box: every attempt is charged once, however it ends, to the hours that it ran in."""

from __future__ import annotations

from functools import partial

import pytest

from gradbox.errors import JobFailed
from gradbox.protocol import JobState, Problem, ResultView
from gradbox_service.accounting.usage import HOUR_S, MINUTE_S, Used
from gradbox_service.backing import Backing
from gradbox_service.jobs import JobRecord
from gradbox_service.jobs.charges import busy_with_running, charge_of, with_running
from tests.service.boxes import a_record, a_spec

HOUR = 490_000
BEGAN_S = HOUR * HOUR_S + 0.75 * HOUR_S
RUNNING = a_record(state=JobState.RUNNING, attempt=1, worker="w", started_s=BEGAN_S)
RESULT = ResultView(size_bytes=500, sha256="0" * 64)
PROBLEM = Problem.of(JobFailed("no"))


def test_seconds_fall_into_the_hours_that_an_attempt_ran_in() -> None:
    after = RUNNING.finish(attempt=1, result=RESULT, now_s=BEGAN_S + HOUR_S)
    assert after is not None
    charge = charge_of(RUNNING, after, now_s=0.0)
    assert charge is not None
    assert charge.by_hour == {
        HOUR: Used(device_ms=900_000),
        HOUR + 1: Used(device_ms=2_700_000, result_bytes=500, num_jobs=1),
    }
    assert sum(charge.busy_ms.values()) == HOUR_S * 1000
    assert set(charge.busy_ms.values()) == {MINUTE_S * 1000}


@pytest.mark.parametrize(
    ("transition", "num_jobs"),
    [
        (partial(JobRecord.fail, attempt=1, error=PROBLEM, now_s=BEGAN_S + 2), 1),
        (partial(JobRecord.cancelled, attempt=1, now_s=BEGAN_S + 2), 1),
        (partial(JobRecord.requeue, attempt=1, reason="lost", now_s=BEGAN_S + 2), 0),
        (partial(JobRecord.release, attempt=1, now_s=BEGAN_S + 2), 0),
    ],
)
def test_an_attempt_is_charged_however_it_ends(
    transition: partial[JobRecord | None], num_jobs: int
) -> None:
    after = transition(RUNNING)
    assert after is not None
    charge = charge_of(RUNNING, after, now_s=BEGAN_S + 2)
    assert charge is not None
    assert charge.by_hour == {HOUR: Used(device_ms=2000, num_jobs=num_jobs)}


def test_what_ends_no_attempt_costs_nothing() -> None:
    queued = a_record()
    begun = queued.begin(worker="w", now_s=BEGAN_S)
    asked = RUNNING.request_cancel(now_s=BEGAN_S)
    done = RUNNING.finish(attempt=1, result=RESULT, now_s=BEGAN_S + 1)
    assert begun is not None
    assert asked is not None
    assert done is not None
    dropped = done.drop_result(now_s=BEGAN_S + 2)
    assert dropped is not None
    for before, after in ((None, queued), (queued, begun), (RUNNING, asked), (done, dropped)):
        assert charge_of(before, after, now_s=BEGAN_S + 9) is None


def test_a_job_that_never_ran_counts_but_takes_no_seconds() -> None:
    cancelled = a_record().request_cancel(now_s=BEGAN_S)
    assert cancelled is not None
    charge = charge_of(a_record(), cancelled, now_s=0.0)
    assert charge is not None
    assert charge.by_hour == {HOUR: Used(num_jobs=1)}


def test_clocks_that_disagree_charge_no_more_than_an_attempt_may_last() -> None:
    ended = RUNNING.fail(attempt=1, error=PROBLEM, now_s=BEGAN_S + 1e9)
    before = RUNNING.fail(attempt=1, error=PROBLEM, now_s=BEGAN_S - 100)
    assert ended is not None
    assert before is not None
    charge = charge_of(RUNNING, ended, now_s=0.0)
    assert charge is not None
    assert sum(used.device_ms for used in charge.by_hour.values()) == 48 * HOUR_S * 1000
    assert len(charge.busy_ms) <= 121
    charge = charge_of(RUNNING, before, now_s=0.0)
    assert charge is not None
    assert sum(used.device_ms for used in charge.by_hour.values()) == 0


def run_one(backing: Backing, job_id: str, *, owner: str, seconds: float) -> None:
    backing.records.create(a_record(job_id, owner=owner), spec=a_spec())
    backing.records.update(job_id, partial(JobRecord.begin, worker="w", now_s=BEGAN_S))
    for _ in range(2):  # the second one does not apply, and so charges nothing
        backing.records.update(
            job_id,
            partial(JobRecord.finish, attempt=1, result=RESULT, now_s=BEGAN_S + seconds),
        )


def test_a_store_charges_each_owner_once(backing: Backing) -> None:
    run_one(backing, "one", owner="ann", seconds=2.0)
    run_one(backing, "two", owner="ann", seconds=0.5)
    run_one(backing, "three", owner="b:b", seconds=1.0)
    assert backing.usage.by_hour(HOUR - 1, HOUR + 1) == {
        HOUR: {"ann": Used(2500, 1000, 2), "b:b": Used(1000, 500, 1)}
    }
    assert backing.usage.by_hour(HOUR + 1, HOUR + 9) == {}
    minute = int(BEGAN_S // MINUTE_S)
    assert backing.usage.busy_ms(minute, minute) == {"w": {minute: 3500}}
    assert backing.usage.busy_ms(minute + 1, minute + 9) == {}


def test_charges_are_added_up_once_and_read_in_full_before_and_after(backing: Backing) -> None:
    run_one(backing, "one", owner="ann", seconds=2.0)
    for _ in range(3):
        assert backing.usage.by_hour(HOUR, HOUR) == {HOUR: {"ann": Used(2000, 500, 1)}}
        backing.usage.add_up()
    run_one(backing, "two", owner="ann", seconds=0.5)
    assert backing.usage.by_hour(HOUR, HOUR) == {HOUR: {"ann": Used(2500, 1000, 2)}}
    minute = int(BEGAN_S // MINUTE_S)
    assert backing.usage.busy_ms(minute, minute) == {"w": {minute: 2500}}


def test_what_still_runs_is_added_by_whoever_reads() -> None:
    charged = {HOUR: {"ann": Used(device_ms=1)}}
    assert with_running(charged, [RUNNING], now_s=BEGAN_S + 1) == {
        HOUR: {"ann": Used(device_ms=1001)}
    }
    assert charged == {HOUR: {"ann": Used(device_ms=1)}}
    minute = int(BEGAN_S // MINUTE_S)
    busy = busy_with_running({"w": {minute: 5}}, [RUNNING], now_s=BEGAN_S + 61)
    assert busy == {"w": {minute: 60_005, minute + 1: 1000}}
