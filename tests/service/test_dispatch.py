"""The dispatcher: order, the short list, and what happens to jobs that nobody holds."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import redis

from gradbox.protocol import JobState
from gradbox_service.backing import Backing
from gradbox_service.database.leadership import Leadership
from gradbox_service.jobs import JobRecord, Records
from gradbox_service.queue import dispatch
from gradbox_service.queue.dispatch import Dispatcher
from gradbox_service.queue.shares import Shares
from gradbox_service.queue.waiting import Waiting
from tests.service.boxes import a_record, a_spec, announce, begin


def dispatcher_of(box: Backing, *, turn_grace_s: float = 60.0) -> Dispatcher:
    return Dispatcher(box, turn_grace_s=turn_grace_s)


def queue(records: Records, *job_ids: str) -> None:
    for age, job_id in enumerate(job_ids):
        records.create(a_record(job_id, created_s=float(age)), spec=a_spec())


def waiting(box: Backing) -> list[str]:
    return [turn.job_id for turn in box.turns.waiting()]


def positions(box: Backing) -> dict[str, int]:
    return {job_id: found.position for job_id, found in box.records.positions().items()}


def take_turns(box: Backing) -> None:
    """Empty the list as workers do that die before they begin anything."""
    box.turns.take_back()


def wait_until(holds: Callable[[], bool]) -> None:
    give_up = time.monotonic() + 30.0
    while not holds():
        assert time.monotonic() < give_up
        time.sleep(0.005)


def ordered(*records: JobRecord, held: dict[str, float] | None = None) -> list[str]:
    shares = Shares(half_life_s=3600.0)
    for owner, seconds in (held or {}).items():
        shares.charge(owner, seconds, at_s=0.0)
    queued = Waiting(shares.key)
    for record in records:
        queued.add(record)
    return [record.id for record in queued.ranked(lambda _: 1.0)]


def test_priority_goes_before_age() -> None:
    old, new = a_record("old"), a_record("new", created_s=9.0, priority=1)
    assert ordered(old, new) == ["new", "old"]


def test_owners_take_turns_whatever_one_of_them_posts() -> None:
    many = [a_record(f"ann{i}", created_s=float(i)) for i in range(3)]
    few = [a_record(f"bob{i}", owner="bob", created_s=10.0 + i) for i in range(2)]
    assert ordered(*many, *few) == ["ann0", "bob0", "ann1", "bob1", "ann2"]


def test_who_used_less_goes_first() -> None:
    ann, bob = a_record("ann0", created_s=1.0), a_record("bob0", owner="bob", created_s=2.0)
    assert ordered(ann, bob, held={"ann": 1}) == ["bob0", "ann0"]


def test_shares_count_across_priorities() -> None:
    urgent = a_record("ann-urgent", priority=5)
    ann, bob = a_record("ann0", created_s=1.0), a_record("bob0", owner="bob", created_s=2.0)
    assert ordered(urgent, ann, bob) == ["ann-urgent", "bob0", "ann0"]


def test_the_list_is_as_long_as_there_are_idle_workers(backing: Backing) -> None:
    announce(backing, name="idle-1")
    announce(backing, name="idle-2")
    announce(backing, name="worker-1")
    queue(backing.records, "runs", "a", "b", "c")
    begin(backing.records, "runs")
    dispatcher = dispatcher_of(backing)
    dispatcher.tick()
    assert waiting(backing) == ["a", "b"]
    dispatcher.tick()
    assert waiting(backing) == ["a", "b"]
    assert positions(backing) == {"a": 1, "b": 2, "c": 3}


def test_one_turn_waits_even_when_no_worker_is_idle(backing: Backing) -> None:
    queue(backing.records, "a", "b")
    dispatcher_of(backing).tick()
    assert waiting(backing) == ["a"]


def test_a_late_job_of_high_priority_overtakes_what_is_not_fed_yet(backing: Backing) -> None:
    queue(backing.records, "a", "b")
    dispatcher = dispatcher_of(backing)
    dispatcher.tick()
    urgent = a_record("urgent", created_s=9.0, priority=5)
    backing.records.create(urgent, spec=a_spec())
    take_turns(backing)
    begin(backing.records, "a")
    dispatcher.tick()
    assert waiting(backing) == ["urgent"]


def test_a_turn_that_is_being_taken_is_not_doubled(backing: Backing) -> None:
    queue(backing.records, "a")
    dispatcher = dispatcher_of(backing)
    dispatcher.tick()
    take_turns(backing)
    dispatcher.tick()
    assert waiting(backing) == []


def test_a_lost_turn_is_fed_again(backing: Backing) -> None:
    queue(backing.records, "a")
    dispatcher = dispatcher_of(backing, turn_grace_s=0.05)
    dispatcher.tick()
    take_turns(backing)
    time.sleep(0.1)
    dispatcher.tick()
    assert waiting(backing) == ["a"]


def test_a_cancelled_jobs_turn_takes_no_place(backing: Backing) -> None:
    queue(backing.records, "a", "b")
    dispatcher = dispatcher_of(backing)
    dispatcher.tick()
    backing.records.update("a", partial(JobRecord.request_cancel, now_s=2.0))
    dispatcher.tick()
    assert waiting(backing) == ["a", "b"]


def test_a_running_job_without_a_lease_is_queued_and_fed_again(backing: Backing) -> None:
    queue(backing.records, "a")
    dispatcher = dispatcher_of(backing)
    dispatcher.tick()
    take_turns(backing)
    begin(backing.records, "a", lease_s=0.001)
    time.sleep(0.01)
    dispatcher.tick()
    record = backing.records.get("a")
    assert record is not None
    assert (record.state, record.losses) == (JobState.QUEUED, 1)
    assert waiting(backing) == ["a"]


def test_a_lost_job_of_a_worker_whose_clock_is_ahead_is_put_back_as_well(backing: Backing) -> None:
    queue(backing.records, "a")
    ahead = partial(JobRecord.begin, worker="w", now_s=time.time() + 3600.0)
    assert backing.records.update("a", ahead, lease_s=0.001) is not None
    time.sleep(0.01)
    dispatcher_of(backing).tick()
    record = backing.records.get("a")
    assert record is not None
    assert record.state is JobState.QUEUED


def test_a_running_job_with_a_lease_is_left_alone(backing: Backing) -> None:
    queue(backing.records, "a")
    begin(backing.records, "a", lease_s=60.0)
    dispatcher_of(backing).tick()
    record = backing.records.get("a")
    assert record is not None
    assert record.state is JobState.RUNNING


def test_a_job_whose_workers_always_die_fails_after_the_last_attempt(backing: Backing) -> None:
    queue(backing.records, "a")
    dispatcher = dispatcher_of(backing)
    for _ in range(3):
        take_turns(backing)
        begin(backing.records, "a", lease_s=0.001)
        time.sleep(0.01)
        dispatcher.tick()
    record = backing.records.get("a")
    assert record is not None
    assert record.state is JobState.FAILED
    assert record.error is not None
    assert record.error.code == "worker-lost"
    assert record.attempt == 3


def test_of_several_processes_one_feeds(backing: Backing, connection: redis.Redis) -> None:
    queue(backing.records, "a")
    leaders = [Leadership(connection) for _ in range(2)]
    dispatchers = [Dispatcher(replace(backing, leadership=leader)) for leader in leaders]
    for dispatcher in dispatchers:
        dispatcher.tick()
    assert waiting(backing) == ["a"]


def test_the_lock_passes_on_when_its_holder_is_gone(connection: redis.Redis) -> None:
    first, second = Leadership(connection), Leadership(connection)
    assert first.hold(ttl_s=600.0)
    assert not second.hold(ttl_s=600.0)
    assert first.hold(ttl_s=0.05)
    time.sleep(0.1)
    assert second.hold(ttl_s=600.0)
    assert not first.hold(ttl_s=600.0)
    first.release()
    assert not first.hold(ttl_s=600.0)
    second.release()
    assert first.hold(ttl_s=600.0)


def test_the_running_dispatcher_feeds_on_a_change(
    backing: Backing, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "TICK_S", 60.0)  # longer than the test waits
    dispatcher = dispatcher_of(backing)
    dispatcher.start()
    try:
        wait_until(lambda: dispatcher.leads)
        queue(backing.records, "a")
        wait_until(lambda: waiting(backing) == ["a"])
    finally:
        dispatcher.close()
        queue(backing.records, "b")  # a change, which wakes it
        dispatcher.join()
    assert not dispatcher.alive
