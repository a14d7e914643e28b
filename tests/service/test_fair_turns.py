"""Whose turn it is: device seconds used, warm models, and what those who wait are told."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import redis

from gradbox.protocol import DeviceMemory, JobState, ResultView
from gradbox_service.backing import Backing
from gradbox_service.fleet import WorkerPresence
from gradbox_service.jobs import JobRecord, QueuePosition, Turn, changes
from gradbox_service.queue.dispatch import Dispatcher
from gradbox_service.queue.shares import MAX_LEAD_S, Shares
from gradbox_service.queue.short_list import MAX_PASSED_BY
from gradbox_service.settings import Settings
from tests.service.boxes import a_record, a_spec, announce, begin
from tests.service.test_dispatch import queue, take_turns, waiting

RESULT = ResultView(size_bytes=0, sha256="0" * 64)


def dispatcher_of(box: Backing, *, clock: Callable[[], float] = time.time) -> Dispatcher:
    return Dispatcher(box, clock=clock)


class FakeTime:
    def __init__(self) -> None:
        self.now_s = 1_000_000.0

    def __call__(self) -> float:
        return self.now_s


def run_next(box: Backing, dispatcher: Dispatcher, clock: FakeTime, seconds: float) -> JobRecord:
    """Let the dispatcher choose, and a worker take that long."""
    dispatcher.tick()
    (job_id,) = waiting(box)
    take_turns(box)
    start = partial(JobRecord.begin, worker="worker-1", now_s=clock())
    record = box.records.update(job_id, start, lease_s=60.0)
    assert record is not None
    clock.now_s += seconds
    end = partial(JobRecord.finish, attempt=1, result=RESULT, now_s=clock())
    assert box.records.update(job_id, end) is not None
    return record


def test_five_users_of_jobs_of_any_length_get_the_same(redis_settings: Settings) -> None:
    """Jain's index of their device seconds, with the real dispatcher on a real Redis."""
    box, clock, draw = Backing.on_redis(redis_settings), FakeTime(), random.Random(0)
    announce(box)
    mean_s = {"ann": 1.0, "bob": 3.0, "cem": 10.0, "dee": 30.0, "eve": 90.0}
    used_s = dict.fromkeys(mean_s, 0.0)
    num_posted = 0

    def post(owner: str) -> None:
        nonlocal num_posted
        num_posted += 1
        record = a_record(f"{owner}{num_posted}", owner=owner, created_s=clock())
        box.records.create(record, spec=a_spec())

    for owner in mean_s:
        post(owner)
        post(owner)
    dispatcher = dispatcher_of(box, clock=clock)
    while min(used_s.values()) < 300.0:
        dispatcher.tick()
        (turn,) = box.turns.waiting()
        waits = box.records.get(turn.job_id)
        assert waits is not None
        seconds = mean_s[waits.owner] * draw.uniform(0.5, 1.5)
        run_next(box, dispatcher, clock, seconds)
        used_s[waits.owner] += seconds
        post(waits.owner)
        assert num_posted < 2000
    jain = sum(used_s.values()) ** 2 / (len(used_s) * sum(s * s for s in used_s.values()))
    assert jain >= 0.95, used_s


def test_who_comes_while_a_turn_waits_for_a_busy_worker_goes_before_it(backing: Backing) -> None:
    clock = FakeTime()
    announce(backing)
    dispatcher = dispatcher_of(backing, clock=clock)

    def post(job_id: str, owner: str) -> None:
        clock.now_s += 1.0
        record = a_record(job_id, owner=owner, created_s=clock())
        backing.records.create(record, spec=a_spec())
        dispatcher.tick()

    post("ann-1", "ann")
    run_next(backing, dispatcher, clock, 100.0)
    post("eve-1", "eve")
    take_turns(backing)
    begin(backing.records, "eve-1")
    post("ann-2", "ann")
    assert waiting(backing) == ["ann-2"]
    post("bob-1", "bob")
    assert waiting(backing) == ["bob-1"]
    post("ann-3", "ann")
    post("bob-2", "bob")
    assert waiting(backing) == ["bob-1"]
    take_turns(backing)
    begin(backing.records, "bob-1")
    dispatcher.tick()
    assert waiting(backing) == ["ann-2"]  # bob holds what his job may take, and ann is older


def test_a_turn_that_a_worker_has_taken_is_not_withdrawn(backing: Backing) -> None:
    turn = Turn("a", 1)
    backing.turns.feed(turn)
    backing.turns.feed(Turn("b", 1))
    assert backing.turns.withdraw(turn)
    assert waiting(backing) == ["b"]
    assert not backing.turns.withdraw(turn)


def test_use_before_a_restart_counts(backing: Backing) -> None:
    clock = FakeTime()
    clock.now_s = time.time()
    announce(backing)
    queue(backing.records, "ann-0", "ann-1")
    run_next(backing, dispatcher_of(backing, clock=clock), clock, 100.0)
    backing.records.create(a_record("bob-0", owner="bob", created_s=9.0), spec=a_spec())
    later = dispatcher_of(backing, clock=clock)
    later.tick()
    assert waiting(backing) == ["bob-0"]
    # An hour's use counts as of its middle.
    assert later.jobs.shares.used_s(now_s=clock())["ann"] == pytest.approx(100.0, rel=0.1)


def test_whose_job_ended_goes_behind_who_used_less(backing: Backing) -> None:
    clock = FakeTime()
    announce(backing)
    dispatcher = dispatcher_of(backing, clock=clock)
    queue(backing.records, "ann-0", "ann-1", "ann-2")
    backing.records.create(a_record("bob-0", owner="bob", created_s=9.0), spec=a_spec())
    assert run_next(backing, dispatcher, clock, 100.0).id == "ann-0"
    dispatcher.tick()
    assert waiting(backing) == ["bob-0"]


def test_a_job_that_runs_on_counts_what_it_has_taken(backing: Backing) -> None:
    clock = FakeTime()
    announce(backing)
    dispatcher = dispatcher_of(backing, clock=clock)
    queue(backing.records, "ann-0")
    run_next(backing, dispatcher, clock, 1.0)  # what is expected of ann's jobs from now on
    backing.records.create(a_record("bob-0", owner="bob"), spec=a_spec())
    run_next(backing, dispatcher, clock, 50.0)
    backing.records.create(a_record("ann-1"), spec=a_spec())
    dispatcher.tick()
    take_turns(backing)
    start = partial(JobRecord.begin, worker="worker-1", now_s=clock())
    backing.records.update("ann-1", start, lease_s=60.0)
    clock.now_s += 300.0
    dispatcher.tick()
    backing.records.create(a_record("ann-2", created_s=2.0), spec=a_spec())
    backing.records.create(a_record("bob-1", owner="bob", created_s=3.0), spec=a_spec())
    dispatcher.tick()
    assert waiting(backing) == ["bob-1"]


def test_a_newcomer_is_ahead_by_a_bounded_amount(backing: Backing) -> None:
    clock = FakeTime()
    announce(backing)
    dispatcher = dispatcher_of(backing, clock=clock)
    queue(backing.records, "ann-0", "ann-1")
    run_next(backing, dispatcher, clock, 5000.0)
    dispatcher.tick()
    backing.records.create(a_record("bob-0", owner="bob", created_s=9.0), spec=a_spec())
    dispatcher.tick()
    shares = dispatcher.jobs.shares
    lead_s = (shares.key("ann") - shares.key("bob")) / shares.weight(clock())
    assert lead_s == pytest.approx(MAX_LEAD_S)


def test_a_second_used_a_half_life_ago_counts_half() -> None:
    shares = Shares(half_life_s=100.0)
    shares.charge("ann", 8.0, at_s=0.0)
    shares.charge("bob", 5.0, at_s=100.0)
    assert shares.used_s(now_s=100.0) == pytest.approx({"ann": 4.0, "bob": 5.0})
    assert shares.key("ann") < shares.key("bob")
    shares.rebase(100_000.0)
    assert shares.key("ann") < shares.key("bob")


def test_who_comes_back_is_ahead_by_a_bounded_amount() -> None:
    shares = Shares(half_life_s=1e9)
    shares.charge("ann", 5000.0, at_s=0.0)
    shares.arrive("bob", ["ann"], now_s=0.0)
    assert shares.key("bob") == pytest.approx(5000.0 - MAX_LEAD_S)


def warm_worker(box: Backing, *models: str) -> None:
    memory = DeviceMemory.model_validate(
        {"total_bytes": 100, "used_bytes": 1, "models": dict.fromkeys(models, 1)}
    )
    worker = WorkerPresence(name="worker-1", device="cpu", state="idle", memory=memory)
    box.fleet.announce(worker, ttl_s=600.0)


def test_a_warm_model_goes_first_but_not_for_ever(redis_settings: Settings) -> None:
    box, clock = Backing.on_redis(redis_settings), FakeTime()
    warm_worker(box, "warm")
    box.records.create(a_record("cold", model="cold", created_s=0.0), spec=a_spec())
    for number in range(MAX_PASSED_BY + 2):
        record = a_record(f"warm{number}", model="warm", created_s=1.0 + number)
        box.records.create(record, spec=a_spec())
    dispatcher = dispatcher_of(box, clock=clock)
    ran = [run_next(box, dispatcher, clock, 1.0).model for _ in range(MAX_PASSED_BY + 2)]
    assert ran == ["warm"] * MAX_PASSED_BY + ["cold", "warm"]


def test_a_warm_model_of_who_used_much_more_does_not_go_first(redis_settings: Settings) -> None:
    box, clock = Backing.on_redis(redis_settings), FakeTime()
    warm_worker(box, "warm")
    box.records.create(a_record("first", model="warm"), spec=a_spec())
    dispatcher = dispatcher_of(box, clock=clock)
    run_next(box, dispatcher, clock, 100.0)
    box.records.create(a_record("ann1", model="warm", created_s=2.0), spec=a_spec())
    box.records.create(a_record("bob1", owner="bob", model="cold", created_s=3.0), spec=a_spec())
    assert run_next(box, dispatcher, clock, 1.0).owner == "bob"


def test_a_place_says_for_whom_and_how_long(backing: Backing) -> None:
    announce(backing)
    queue(backing.records, "runs", "a", "b")
    begin(backing.records, "runs", lease_s=60.0)
    bobs = a_record("bobs", owner="bob", created_s=9.0, priority=-1)
    backing.records.create(bobs, spec=a_spec())
    dispatcher_of(backing).tick()
    bobs = backing.records.positions()["bobs"]
    assert (bobs.position, bobs.waiting_for) == (3, {"ann": 3})
    assert bobs.seconds_left == pytest.approx(3.0, abs=0.5)  # of unknown jobs, a second each


def test_changes_that_were_trimmed_unread_are_not_missed(
    redis_settings: Settings, connection: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gradbox_service.jobs.records.CHANGES_READ", 10)
    box = Backing.on_redis(redis_settings)
    queue(box.records, "a")
    dispatcher = dispatcher_of(box)
    dispatcher.tick()
    box.records.update("a", partial(JobRecord.request_cancel, now_s=2.0))
    queue(box.records, *(f"b{number}" for number in range(20)))
    connection.xtrim(changes.CHANGES, maxlen=12, approximate=False)
    take_turns(box)
    dispatcher.tick()
    assert waiting(box) == ["b0"]
    assert dispatcher.jobs.queued("a") is None


def test_ends_among_changes_that_were_trimmed_are_noted_once(
    redis_settings: Settings, connection: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gradbox_service.jobs.records.CHANGES_READ", 4)
    box = Backing.on_redis(redis_settings)
    queue(box.records, "a", "b")
    ended: list[str] = []
    dispatcher = Dispatcher(box, clock=FakeTime(), ended=lambda record: ended.append(record.id))
    dispatcher.tick()
    end = partial(JobRecord.request_cancel, now_s=FakeTime()())
    box.records.update("a", end)  # its change is trimmed
    queue(box.records, "c")
    box.records.update("b", end)  # its change is read together with "missed"
    queue(box.records, "d")
    box.records.update("d", end)  # was never held here
    connection.xtrim(changes.CHANGES, maxlen=4, approximate=False)
    dispatcher.tick()
    assert sorted(ended) == ["a", "b", "d"]
    box.records.update("c", end)
    dispatcher.tick()
    assert sorted(ended) == ["a", "b", "c", "d"]


def test_what_no_change_told_is_found_by_comparing(
    redis_settings: Settings, connection: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gradbox_service.queue.following.COMPARE_S", 0.0)
    box = Backing.on_redis(redis_settings)
    dispatcher = dispatcher_of(box)
    dispatcher.tick()
    queue(box.records, "a")
    connection.delete(changes.CHANGES)
    dispatcher.tick()
    assert waiting(box) == ["a"]


def test_a_changed_priority_moves_a_job(backing: Backing) -> None:
    queue(backing.records, "a", "b", "c")
    dispatcher = dispatcher_of(backing)
    dispatcher.tick()
    backing.records.update("c", lambda record: replace(record, priority=5))
    take_turns(backing)
    begin(backing.records, "a")
    dispatcher.tick()
    assert waiting(backing) == ["c"]


def test_a_new_leader_knows_the_turns_of_the_one_before(backing: Backing) -> None:
    queue(backing.records, "a", "b")
    dispatcher_of(backing).tick()
    second = dispatcher_of(backing)
    second.tick()
    assert waiting(backing) == ["a"]
    assert [record.id for record in second.jobs.fed] == ["a"]
    assert backing.records.positions() == {
        "a": QueuePosition(1, {}, None),
        "b": QueuePosition(2, {"ann": 1}, None),
    }
    assert all(record.state is JobState.QUEUED for record in second.jobs.fed)
