"""What a turn makes of a record, for every way in which the device's work can end."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import redis

from gradbox.errors import LossNotFinite
from gradbox.protocol import (
    JobState,
    Problem,
    ProgressView,
    ResultView,
)
from gradbox_service.backing import Backing
from gradbox_service.fleet import WorkerPresence
from gradbox_service.jobs import JobRecord, Records, Transition, Turn
from gradbox_service.settings import Settings
from gradbox_worker.device.last_step import LastStep
from gradbox_worker.device.orders import Orders
from gradbox_worker.turns import supervision as supervision_module
from gradbox_worker.turns.supervision import AttemptWatch, Patience, StopReason
from gradbox_worker.turns.turn import Attempts, TurnRunner
from gradbox_worker.work import Died, Failed, Finished, Outcome, Stopped, Supervision, Work
from tests.valkey import empty_backing
from tests.worker.box import Box, shards_of

PATIENCE = Patience(cancel_grace_s=7.0, timeout_grace_s=3.0)

FINISHED = Finished(ResultView(size_bytes=3, sha256="0" * 64))


class ScriptedDevice:
    """Implements `Device` by a function of the test's own."""

    def __init__(self, script: Callable[[Work, Supervision], Outcome]) -> None:
        self.models: dict[str, str] = {}
        self._script = script
        self.works: list[Work] = []

    def run(self, work: Work, supervision: Supervision) -> Outcome:
        self.works.append(work)
        return self._script(work, supervision)

    def rest(self) -> float | None:
        return None

    def close(self) -> None: ...


class LosesAnswers(Records):
    """The first change to a state is made, and its answer lost.

    redis-py sends the script again, and `Records` finds that the transition applies no more;
    if it cannot connect again, it raises.
    """

    def __init__(self, box: Backing, state: JobState, error: Exception | None) -> None:
        super().__init__(box.records._redis)
        self.lost = False
        self._state = state
        self._error = error

    def update(self, job_id: str, transition: Transition, **given: Any) -> JobRecord | None:
        after = super().update(job_id, transition, **given)
        if self.lost or after is None or after.state is not self._state:
            return after
        self.lost = True
        if self._error is not None:
            raise self._error
        return super().update(job_id, transition, **given)


@pytest.fixture
def box(tmp_path: Path) -> Box:
    return Box(tmp_path, empty_backing(tmp_path))


def runner(
    box: Box, script: Callable[[Work, Supervision], Outcome], *, leaving: bool = False
) -> TurnRunner:
    orders = Orders()
    orders.last = orders.leaving = leaving
    return TurnRunner(
        Attempts(
            box.backing.records,
            box.backing.turns,
            box.backing.results,
            box.backing.runs,
            box.backing.stores,
            "w",
            leaving=lambda: leaving,
        ),
        ScriptedDevice(script),
        orders,
        LastStep(),
        lease_s=60.0,
    )


def watch_of(box: Box) -> AttemptWatch:
    """Return the worker's watch of what its device has in hand."""
    held = box.backing.turns.held("w")
    assert held is not None
    return AttemptWatch(box.backing.records, held, patience=PATIENCE)


def writes_result(work: Work, supervision: Supervision) -> Outcome:
    work.result_path.parent.mkdir(parents=True, exist_ok=True)
    work.result_path.write_bytes(b"abc")
    return FINISHED


def stops_when_told(work: Work, supervision: Supervision) -> Outcome:
    deadline = time.monotonic() + 60
    while not supervision.stop_requested():
        assert time.monotonic() < deadline
    return Stopped()


def test_a_finished_job_is_done_and_keeps_its_result(box: Box) -> None:
    job = box.submit(box.spec(shards_of(1)))
    assert runner(box, writes_result).run(job) == "done"
    record = box.record(job)
    assert (record.state, record.result, record.worker) == (JobState.DONE, FINISHED.result, "w")
    assert box.backing.results.path(job, attempt=1).exists()


@pytest.mark.parametrize("state", [JobState.RUNNING, JobState.DONE])
@pytest.mark.parametrize("error", [None, redis.ConnectionError("reset")], ids=["watch", "away"])
def test_no_attempt_is_lost_with_the_answer_to_its_begin_or_its_end(
    error: Exception | None, state: JobState, tmp_path: Path
) -> None:
    backing = empty_backing(tmp_path)
    records = LosesAnswers(backing, state, error)
    box = Box(tmp_path, dataclasses.replace(backing, records=records))
    job = box.submit(box.spec(shards_of(1)))
    assert runner(box, writes_result).run(job) == "done"
    assert records.lost
    assert (box.record(job).state, box.record(job).attempt) == (JobState.DONE, 1)
    assert box.backing.results.path(job, attempt=1).read_bytes() == b"abc"


def test_the_device_is_told_the_version_that_the_job_was_accepted_for(box: Box) -> None:
    job = box.submit(box.spec(shards_of(1)), version="abc")
    turn = runner(box, writes_result)
    turn.run(job)
    assert isinstance(turn.device, ScriptedDevice)
    assert [(w.model, w.model_version, w.attempt) for w in turn.device.works] == [("m", "abc", 1)]


def test_the_device_is_told_how_long_the_job_waited_and_what_stays_free(tmp_path: Path) -> None:
    settings = Settings(data=tmp_path, disk_reserve_bytes=12_345)
    box = Box(tmp_path, empty_backing(tmp_path, settings))
    job = box.submit(box.spec(shards_of(1)))
    turn = runner(box, writes_result)
    turn.run(job)
    assert isinstance(turn.device, ScriptedDevice)
    (work,) = turn.device.works
    record = box.record(job)
    assert record.started_s is not None
    assert work.queued_s == record.started_s - record.created_s > 0
    assert work.disk_reserve_bytes == 12_345


class Refuses(Records):
    """The first end of a job is refused."""

    def __init__(self, box: Backing) -> None:
        super().__init__(box.records._redis)
        self.refused = False

    def update(self, job_id: str, transition: Transition, **given: Any) -> JobRecord | None:
        record = self.get(job_id)
        if not self.refused and record is not None and record.state is JobState.RUNNING:
            self.refused = True
            raise redis.OutOfMemoryError("used memory > 'maxmemory'")
        return super().update(job_id, transition, **given)


@pytest.mark.parametrize("leaving", [False, True])
def test_an_end_that_redis_refuses_is_noted_later_unless_the_worker_leaves(
    leaving: bool, tmp_path: Path
) -> None:
    backing = empty_backing(tmp_path)
    box = Box(tmp_path, dataclasses.replace(backing, records=Refuses(backing)))
    job = box.submit(box.spec(shards_of(1)))
    turn = runner(box, writes_result, leaving=leaving)
    if leaving:
        with pytest.raises(redis.OutOfMemoryError):
            turn.run(job)
    else:
        assert turn.run(job) == "done"
    assert box.record(job).state is (JobState.RUNNING if leaving else JobState.DONE)
    assert box.backing.results.path(job, attempt=1).exists()


def offer(box: Box, *, name: str, version: str) -> None:
    presence = WorkerPresence(name=name, device="cpu", state="idle", models={"m": version})
    box.backing.fleet.announce(presence, ttl_s=60.0)


def test_a_job_of_a_model_that_only_another_worker_has_is_left_to_it(box: Box) -> None:
    job = box.submit(box.spec(shards_of(1)), version="new")
    offer(box, name="other", version="new")
    offer(box, name="w", version="old")
    turn = dataclasses.replace(runner(box, writes_result), fleet=box.backing.fleet)
    assert turn.run(job) == "skipped"
    assert (box.record(job).state, box.record(job).attempt) == (JobState.QUEUED, 0)


def test_a_job_of_a_model_that_nobody_has_any_more_is_begun(box: Box) -> None:
    job = box.submit(box.spec(shards_of(1)), version="new")
    offer(box, name="other", version="old")
    turn = dataclasses.replace(runner(box, writes_result), fleet=box.backing.fleet)
    assert turn.run(job) == "done"


def test_a_job_that_failed_by_its_own_fault_is_not_tried_again(box: Box) -> None:
    job = box.submit(box.spec(shards_of(1)))
    problem = Problem.of(LossNotFinite("the loss is nan"))
    assert runner(box, lambda *_: Failed(problem)).run(job) == "failed"
    assert box.record(job).error == problem


def test_a_job_cancelled_before_its_turn_is_not_run(box: Box) -> None:
    job = box.submit(box.spec(shards_of(1)))
    box.cancel(job)
    turn = runner(box, writes_result)
    assert turn.run(job) == "skipped"
    assert isinstance(turn.device, ScriptedDevice)
    assert turn.device.works == []


def test_a_second_turn_of_the_same_job_does_nothing(box: Box) -> None:
    job = box.submit(box.spec(shards_of(1)))
    turn = runner(box, writes_result)
    assert (turn.run(job), turn.run(job)) == ("done", "skipped")


def test_a_cancellation_reaches_the_device_by_its_worker(box: Box) -> None:
    job = box.submit(box.spec(shards_of(1)))

    def script(work: Work, supervision: Supervision) -> Outcome:
        watch = watch_of(box)
        watch.look(None)
        assert watch.stop_reason is None
        box.cancel(job)
        assert not supervision.stop_requested()  # it looks when it is asked to
        watch.look(None)
        assert watch.stop_reason is StopReason.CANCELLED
        assert not watch.is_overdue()
        turn.orders.ask_to_look()
        assert supervision.stop_requested()
        return Stopped()

    turn = runner(box, script)
    assert turn.run(job) == "cancelled"


def test_an_order_to_look_stops_no_job_that_may_go_on(box: Box) -> None:
    job = box.submit(box.spec(shards_of(1)))

    def script(work: Work, supervision: Supervision) -> Outcome:
        turn.orders.ask_to_look()  # it was meant for the job before
        assert not supervision.stop_requested()
        turn.orders.ask_for_end()
        assert not supervision.stop_requested()  # this job is the last, and ends by itself
        return writes_result(work, supervision)

    turn = runner(box, script)
    assert turn.run(job) == "done"


def test_what_the_device_has_in_hand_is_noted_while_the_attempt_runs(box: Box) -> None:
    job = box.submit(box.spec(shards_of(1)))
    turns = box.backing.turns

    def script(work: Work, supervision: Supervision) -> Outcome:
        assert turns.held("w") == Turn(job, 1)
        return writes_result(work, supervision)

    assert runner(box, script).run(job) == "done"
    assert turns.held("w") is None


def test_a_job_that_does_not_stop_in_time_is_overdue(
    box: Box, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = box.submit(box.spec(shards_of(1), timeout_s=5.0))
    now = 100.0
    clock = SimpleNamespace(monotonic=lambda: now, time=time.time)
    monkeypatch.setattr(supervision_module, "time", clock)
    found = []

    def script(work: Work, supervision: Supervision) -> Outcome:
        nonlocal now
        watch = watch_of(box)
        for at_s in (100.0, 106.0, 108.9, 109.1):
            now = at_s
            watch.look(None)
            found.append((watch.stop_reason, watch.is_overdue()))
        return Died("it was killed")

    assert runner(box, script).run(job) == "queued"
    late = StopReason.OUT_OF_TIME
    assert found == [(None, False), (late, False), (late, False), (late, True)]


def test_a_job_over_its_time_limit_fails_with_the_limit_and_the_way_out(box: Box) -> None:
    job = box.submit(box.spec(shards_of(1), timeout_s=0.05))
    assert runner(box, stops_when_told).run(job) == "failed"
    error = box.record(job).error
    assert error is not None
    assert error.code == "job-timed-out"
    assert "timeout_s of 0.05 s" in error.detail


def test_a_worker_that_leaves_gives_the_job_back_unharmed(box: Box) -> None:
    job = box.submit(box.spec(shards_of(1)))
    assert runner(box, stops_when_told, leaving=True).run(job) == "queued"
    assert box.record(job).losses == 0


def test_a_device_that_dies_loses_the_attempt_until_none_is_left(box: Box) -> None:
    job = box.submit(box.spec(shards_of(1)))
    turn = runner(box, lambda *_: Died("it was killed by SIGKILL"))
    assert [turn.run(job) for _ in range(4)] == ["queued", "queued", "failed", "skipped"]
    error = box.record(job).error
    assert error is not None
    assert error.code == "worker-lost"
    assert "its device process ended: it was killed by SIGKILL" in error.detail


def test_the_same_fault_twice_ends_the_job_and_says_so(box: Box) -> None:
    job = box.submit(box.spec(shards_of(1)))
    died = Died("it was killed by SIGSEGV", fault="SIGSEGV after 3 of 5 steps")
    turn = runner(box, lambda *_: died)
    assert [turn.run(job) for _ in range(2)] == ["queued", "failed"]
    error = box.record(job).error
    assert error is not None
    assert error.code == "worker-lost"
    assert "two attempts ended by the same fault (SIGSEGV after 3 of 5 steps)" in error.detail


def test_memory_that_the_kernel_takes_back_twice_is_out_of_memory(box: Box) -> None:
    job = box.submit(box.spec(shards_of(1)))
    died = Died("it was killed", fault="killed after 3 of 5 steps", out_of_memory=True)
    turn = runner(box, lambda *_: died)
    assert [turn.run(job) for _ in range(2)] == ["queued", "failed"]
    error = box.record(job).error
    assert error is not None
    assert error.code == "out-of-memory"
    assert "smaller shards" in error.detail


@pytest.mark.parametrize(
    "other", ["SIGSEGV after 4 of 5 steps", "SIGABRT after 3 of 5 steps", None]
)
def test_another_fault_or_none_between_two_leaves_the_job_its_attempts(
    box: Box, other: str | None
) -> None:
    job = box.submit(box.spec(shards_of(1)))
    faults = iter(["SIGSEGV after 3 of 5 steps", other])
    turn = runner(box, lambda *_: Died("it was killed", fault=next(faults)))
    assert [turn.run(job) for _ in range(2)] == ["queued", "queued"]


def test_a_device_that_dies_while_a_cancellation_is_pending_ends_the_job(box: Box) -> None:
    job = box.submit(box.spec(shards_of(1)))

    def script(work: Work, supervision: Supervision) -> Outcome:
        box.cancel(job)
        return Died("it was killed by SIGKILL")

    assert runner(box, script).run(job) == "cancelled"


def test_a_device_that_ends_before_it_has_begun_gives_the_job_back(box: Box) -> None:
    job = box.submit(box.spec(shards_of(1)))
    turn = runner(box, lambda *_: Stopped(leaving=True))
    assert turn.run(job) == "queued"
    assert turn.spoilt
    assert box.record(job).losses == 0


def test_what_a_superseded_attempt_finishes_is_thrown_away(box: Box) -> None:
    job = box.submit(box.spec(shards_of(1)))

    def script(work: Work, supervision: Supervision) -> Outcome:
        watch, lose = watch_of(box), time.time()
        box.backing.records.update(job, lambda r: r.requeue(attempt=1, reason="x", now_s=lose))
        box.backing.records.update(job, lambda r: r.begin(worker="other", now_s=lose))
        watch.look(None)
        assert watch.stop_reason is StopReason.NOT_OURS
        turn.orders.ask_to_look()
        assert supervision.stop_requested()
        return writes_result(work, supervision)

    turn = runner(box, script)
    assert turn.run(job) == "skipped"
    assert box.backing.turns.held("w") is None
    assert not box.backing.results.path(job, attempt=1).exists()
    assert (box.record(job).state, box.record(job).worker) == (JobState.RUNNING, "other")


def test_progress_goes_to_the_record_with_an_estimate(
    box: Box, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = box.submit(box.spec(shards_of(1)))
    told: list[ProgressView | None] = []
    now = 100.0
    clock = SimpleNamespace(monotonic=lambda: now, time=time.time)
    monkeypatch.setattr(supervision_module, "time", clock)

    def script(work: Work, supervision: Supervision) -> Outcome:
        nonlocal now
        watch = watch_of(box)
        for done in range(3):
            supervision.progress("replay", done, 4)
            for _ in range(2):  # the second time nothing is new
                watch.look(turn.step.read())
            now += 0.5
        told.append(box.record(job).progress)
        return FINISHED

    turn = runner(box, script)
    turn.run(job)
    (progress,) = told
    assert progress is not None
    assert (progress.phase, progress.done, progress.total) == ("replay", 2, 4)
    assert progress.seconds_left == pytest.approx(1.0)
    ended = box.record(job).progress
    assert ended is not None
    assert (ended.done, ended.total) == (4, 4)
    kinds = [event.kind for event in box.backing.records.events(job)]
    assert kinds.count("progress") == 3


def test_progress_that_nobody_looks_at_costs_no_event(box: Box) -> None:
    job = box.submit(box.spec(shards_of(1)))

    def script(work: Work, supervision: Supervision) -> Outcome:
        for phase in ("forward", "cotangents", "replay"):
            supervision.progress(phase, 0, 1)
        return FINISHED

    runner(box, script).run(job)
    kinds = [event.kind for event in box.backing.records.events(job)]
    assert kinds == ["state", "state", "state"]


def test_a_restarted_worker_takes_back_what_it_held(box: Box) -> None:
    mine, theirs = (box.submit(box.spec(shards_of(1))) for _ in range(2))
    for job, worker in ((mine, "w"), (theirs, "other")):
        box.backing.records.update(
            job, lambda r, worker=worker: r.begin(worker=worker, now_s=time.time())
        )
    runner(box, writes_result).attempts.recover()
    assert (box.record(mine).state, box.record(mine).losses) == (JobState.QUEUED, 1)
    assert box.record(theirs).state is JobState.RUNNING
