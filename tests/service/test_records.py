"""Both stores of records behave alike."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import redis

from gradbox.errors import IdempotencyConflict, JobFailed
from gradbox.protocol import JobState, JobView, Problem, ProgressView, ResultView
from gradbox_service.backing import Backing
from gradbox_service.jobs import JobRecord, QueuePosition, Records
from gradbox_service.jobs.changes import MAX_CARRIED_BYTES
from tests.service.boxes import a_record, a_spec, advance, begin


@pytest.fixture
def records(backing: Backing) -> Records:
    return backing.records


def test_a_created_job_is_found_with_its_spec(records: Records) -> None:
    spec = a_spec(seed=7)
    records.create(a_record(), spec=spec)
    assert records.get("job1") == a_record()
    assert records.spec("job1") == spec
    assert records.active() == [a_record()]


def test_an_unknown_job_is_none(records: Records) -> None:
    assert records.get("nope") is None
    assert records.spec("nope") is None
    assert records.update("nope", lambda record: record) is None
    assert records.events("nope") == []


def test_a_key_gives_the_same_job_again(records: Records) -> None:
    first = records.create(a_record("one"), spec=a_spec(), idempotency_key="k")
    second = records.create(a_record("two"), spec=a_spec(), idempotency_key="k")
    assert first == second
    assert records.get("two") is None
    assert records.posted("ann", idempotency_key="k", spec_digest="d" * 64) == first


def test_a_key_with_another_spec_is_a_conflict(records: Records) -> None:
    records.create(a_record("one"), spec=a_spec(), idempotency_key="k")
    with pytest.raises(IdempotencyConflict, match="'k'"):
        records.create(a_record("two", spec_digest="e"), spec=a_spec(), idempotency_key="k")


def test_a_key_is_free_again_once_its_job_is_forgotten(records: Records) -> None:
    records.create(a_record("one"), spec=a_spec(), idempotency_key="k")
    records.update("one", partial(JobRecord.request_cancel, now_s=9.0))
    records.forget("one")
    other = a_record("two", spec_digest="e" * 64)
    assert records.create(other, spec=a_spec(), idempotency_key="k").id == "two"
    again = replace(other, id="three")
    assert records.create(again, spec=a_spec(), idempotency_key="k").id == "two"


def test_specs_are_counted_while_their_jobs_wait_or_run(records: Records) -> None:
    for job_id in ("waits", "runs", "ends"):
        records.create(a_record(job_id), spec=a_spec())
    records.create(a_record("other", owner="bob"), spec=a_spec())
    begin(records, "runs")
    records.update("ends", partial(JobRecord.request_cancel, now_s=9.0))
    assert records.spec_bytes("ann") == 2 * records.spec_bytes("bob") > 0
    assert records.spec_bytes("nobody") == 0


def test_a_spec_goes_with_the_end_of_a_job_that_nobody_goes_on_from(records: Records) -> None:
    for job_id in ("done", "failed", "cancelled"):
        records.create(a_record(job_id), spec=a_spec())
        begin(records, job_id)
    finish: Any = {"attempt": 1, "now_s": 9.0}
    result = ResultView(size_bytes=1, sha256="0" * 64)
    problem = Problem.of(JobFailed("no"))
    records.update("done", partial(JobRecord.finish, result=result, **finish))
    records.update("failed", partial(JobRecord.fail, error=problem, **finish))
    records.update("cancelled", partial(JobRecord.cancelled, **finish))
    assert records.spec("done") == a_spec()
    assert records.spec("failed") is records.spec("cancelled") is None


def test_redis_holds_nothing_of_a_forgotten_job_but_its_owner_and_use(
    connection: redis.Redis,
) -> None:
    records = Records(connection)
    records.create(a_record("one"), spec=a_spec(), idempotency_key="k")
    records.update("one", partial(JobRecord.request_cancel, now_s=9.0))
    records.forget("one")
    left = {key.decode() for key in connection.keys("*")}  # type: ignore[union-attr]
    assert left == {"gradbox:owners", "gradbox:changes", "gradbox:charges"}


def test_keys_of_two_owners_do_not_meet(records: Records) -> None:
    records.create(a_record("one"), spec=a_spec(), idempotency_key="k")
    other = a_record("two", owner="bob", spec_digest="e")
    assert records.create(other, spec=a_spec(), idempotency_key="k").id == "two"


def test_twenty_creations_at_once_under_one_key_make_one_job(records: Records) -> None:
    def create(number: int) -> JobRecord:
        return records.create(a_record(f"job{number}"), spec=a_spec(), idempotency_key="k")

    with ThreadPoolExecutor(20) as pool:
        made = set(pool.map(create, range(20)))
    assert len(made) == 1
    assert len(records.active()) == 1


@pytest.mark.parametrize("key", [None, "k"])
def test_a_creation_whose_answer_is_lost_does_not_undo_what_a_worker_began(
    key: str | None, connection: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = Records(connection)
    parse = redis.Redis.parse_response
    lost: list[str] = []

    def parse_and_break(client: Any, link: Any, command: str, **options: Any) -> Any:
        answer = parse(client, link, command, **options)
        if command == "EVALSHA" and not lost:
            lost.append(command)
            begin(records, "job1")
            raise redis.ConnectionError("the answer is lost")
        return answer

    monkeypatch.setattr(redis.Redis, "parse_response", parse_and_break)
    created = records.create(a_record(), spec=a_spec(), idempotency_key=key)
    assert created == records.get("job1")
    assert created.held_by(1)
    assert [event.kind for event in records.events("job1")] == ["state", "state"]


def test_one_of_many_workers_begins_a_job(records: Records) -> None:
    records.create(a_record(), spec=a_spec())

    def take(number: int) -> JobRecord | None:
        return records.update("job1", partial(JobRecord.begin, worker=str(number), now_s=1.0))

    with ThreadPoolExecutor(10) as pool:
        taken = [record for record in pool.map(take, range(10)) if record is not None]
    assert len(taken) == 1
    assert records.get("job1") == taken[0]


def test_no_update_is_lost_between_many_writers(records: Records) -> None:
    records.create(a_record(), spec=a_spec())

    def lower(record: JobRecord) -> JobRecord:
        return replace(record, priority=record.priority - 1)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: records.update("job1", lower), range(40)))
    record = records.get("job1")
    assert record is not None
    assert record.priority == -40


def test_an_ended_job_is_active_no_more(records: Records) -> None:
    records.create(a_record(), spec=a_spec())
    records.update("job1", partial(JobRecord.request_cancel, now_s=2.0))
    assert records.active() == []


def test_a_lease_ends_without_beats(records: Records) -> None:
    records.create(a_record(), spec=a_spec())
    begin(records, "job1", lease_s=600.0)
    assert records.leased("job1", attempt=1)
    assert not records.leased("job1", attempt=2)
    beaten = records.beat("job1", attempt=1, lease_s=0.05)
    assert beaten is not None
    assert beaten.held_by(1)
    time.sleep(0.1)
    assert not records.leased("job1", attempt=1)


def test_a_beat_prolongs_the_lease(records: Records) -> None:
    records.create(a_record(), spec=a_spec())
    begin(records, "job1", lease_s=1.0)
    records.beat("job1", attempt=1, lease_s=600.0)
    time.sleep(1.1)
    assert records.leased("job1", attempt=1)


def test_a_beat_brings_the_request_to_cancel(records: Records) -> None:
    records.create(a_record(), spec=a_spec())
    begin(records, "job1")
    records.update("job1", partial(JobRecord.request_cancel, now_s=2.0))
    record = records.beat("job1", attempt=1, lease_s=1.0)
    assert record is not None
    assert record.cancel_requested


def test_the_beat_of_a_superseded_attempt_keeps_nothing_alive(records: Records) -> None:
    records.create(a_record(), spec=a_spec())
    begin(records, "job1", lease_s=0.01)
    records.update("job1", partial(JobRecord.requeue, attempt=1, reason="x", now_s=2.0))
    begin(records, "job1", lease_s=0.01)
    record = records.beat("job1", attempt=1, lease_s=60.0)
    assert record is not None
    assert not record.held_by(1)
    time.sleep(0.03)
    assert not records.leased("job1", attempt=2)


def test_events_tell_states_and_progress_in_order(records: Records) -> None:
    records.create(a_record(), spec=a_spec())
    begin(records, "job1")
    advance(records, "job1", attempt=1, done=1)
    records.update("job1", partial(JobRecord.cancelled, attempt=1, now_s=2.0))
    events = records.events("job1")
    assert [event.kind for event in events] == ["state", "state", "progress", "state"]
    assert [event.final for event in events] == [False, False, False, True]
    states = [JobView.model_validate_json(e.data).state for e in events if e.kind == "state"]
    assert states == [JobState.QUEUED, JobState.RUNNING, JobState.CANCELLED]
    assert ProgressView.model_validate_json(events[2].data).done == 1


def test_events_resume_behind_an_id(records: Records) -> None:
    records.create(a_record(), spec=a_spec())
    begin(records, "job1")
    advance(records, "job1", attempt=1, done=1)
    events = records.events("job1")
    assert records.events("job1", after=events[0].id) == events[1:]
    assert records.events("job1", after=events[-1].id) == []


@pytest.mark.parametrize("after", ["", "x", "1-x", "-", "²-1", "9" * 40])
def test_an_id_that_is_none_reads_from_the_beginning(records: Records, after: str) -> None:
    records.create(a_record(), spec=a_spec())
    assert len(records.events("job1", after=after)) == 1


def test_a_transition_that_does_not_apply_leaves_no_event(records: Records) -> None:
    records.create(a_record(), spec=a_spec())
    assert records.update("job1", partial(JobRecord.cancelled, attempt=1, now_s=2.0)) is None
    assert len(records.events("job1")) == 1


def test_a_result_deleted_after_the_end_leaves_the_final_event_the_last(records: Records) -> None:
    records.create(a_record(), spec=a_spec())
    result = ResultView(size_bytes=1, sha256="0" * 64)
    begun = begin(records, "job1")
    finish = partial(JobRecord.finish, attempt=begun.attempt, result=result, now_s=9.0)
    records.update("job1", finish)
    events = records.events("job1")
    dropped = records.update("job1", partial(JobRecord.drop_result, now_s=10.0))
    assert dropped is not None
    assert [event.final for event in events] == [False, False, True]
    assert records.events("job1") == events


def test_changes_wait_for_what_comes(records: Records) -> None:
    records.create(a_record("before"), spec=a_spec())
    cursor, changes = records.changes(None, wait_s=0.0)
    assert not changes
    timer = threading.Timer(0.1, lambda: records.create(a_record("after"), spec=a_spec()))
    timer.start()
    begun = time.monotonic()
    cursor, changes = records.changes(cursor, wait_s=60.0)
    timer.join()
    assert time.monotonic() - begun < 30.0
    assert [(change.job_id, change.kind) for change in changes] == [("after", "state")]
    cursor_after, changes = records.changes(cursor, wait_s=0.01)
    assert (cursor_after, list(changes)) == (cursor, [])


def test_a_change_of_state_tells_the_record_that_it_left(records: Records) -> None:
    cursor, _ = records.changes(None, wait_s=0.0)
    created = records.create(a_record(), spec=a_spec())
    begun = begin(records, "job1")
    _, changes = records.changes(cursor, wait_s=0.0)
    assert [change.record for change in changes] == [created, begun]


def test_a_large_record_is_not_told_with_its_change(connection: redis.Redis) -> None:
    records = Records(connection)
    cursor, _ = records.changes(None, wait_s=0.0)
    records.create(a_record(name="x" * MAX_CARRIED_BYTES), spec=a_spec())
    _, (change,) = records.changes(cursor, wait_s=0.0)
    assert (change.job_id, change.kind, change.record) == ("job1", "state", None)


def test_places_are_kept(records: Records) -> None:
    last = QueuePosition(2, {"ann": 1}, time.time() + 40.0, "paused by root")
    records.set_positions({"b": QueuePosition(1), "a": last})
    assert records.positions() == {"b": QueuePosition(1), "a": last}
    assert records.positions(["a", "nope"]) == {"a": last}
    records.set_positions({})
    assert records.positions() == {}
