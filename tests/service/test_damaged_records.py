"""A record, an event or an announcement that cannot be read ends nothing but itself."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator

import pytest
import redis

from gradbox_service.backing import Backing
from gradbox_service.jobs import Records
from gradbox_service.jobs.records import SET_ASIDE
from gradbox_service.queue.dispatch import Dispatcher
from gradbox_service.settings import Settings
from tests.service.boxes import a_record, a_spec, announce, begin, submit
from tests.service.conftest import Box, serve

GOOD = json.loads(a_record().to_json())
DAMAGED = {
    "not JSON": b"\0\0\0\0",
    "no record": b"[]",
    "a field missing": json.dumps({k: v for k, v in GOOD.items() if k != "model"}).encode(),
    "an unknown state": json.dumps(GOOD | {"state": "paused"}).encode(),
    "a later version": json.dumps(GOOD | {"version": 99}).encode(),
}
EACH = pytest.mark.parametrize("damaged", DAMAGED.values(), ids=DAMAGED.keys())


@pytest.fixture
def backing(redis_settings: Settings) -> Backing:
    return Backing.on_redis(redis_settings)


@pytest.fixture
def records(connection: redis.Redis) -> Records:
    found = Records(connection)
    found.create(a_record(), spec=a_spec())
    return found


@pytest.fixture
def redis_box(backing: Backing, redis_settings: Settings) -> Iterator[Box]:
    yield from serve(backing, redis_settings)


@EACH
def test_a_damaged_record_is_set_aside_and_its_job_forgotten(
    records: Records,
    connection: redis.Redis,
    damaged: bytes,
    caplog: pytest.LogCaptureFixture,
) -> None:
    connection.set("gradbox:job:job1", damaged)
    assert records.get("job1") is None
    assert connection.hget(SET_ASIDE, "job1") == damaged
    assert repr(damaged)[2:20] in caplog.text
    assert list(records.active_ids()) == list(records.oldest("ann")) == []
    assert records.num_active("ann") == 0


@EACH
def test_the_dispatcher_feeds_the_other_jobs(
    backing: Backing, connection: redis.Redis, damaged: bytes
) -> None:
    announce(backing)
    for job_id in ("bad", "good"):
        backing.records.create(a_record(job_id), spec=a_spec())
    connection.set("gradbox:job:bad", damaged)
    Dispatcher(backing).tick()
    assert [turn.job_id for turn in backing.turns.waiting()] == ["good"]


def test_a_running_attempt_learns_that_its_record_was_damaged(
    records: Records, connection: redis.Redis
) -> None:
    begin(records, "job1")
    connection.set("gradbox:job:job1", b"{")
    assert records.beat("job1", attempt=1, lease_s=5.0) is None


def test_a_change_of_a_damaged_record_does_not_apply(
    records: Records, connection: redis.Redis
) -> None:
    connection.set("gradbox:job:job1", b"{")
    assert records.update("job1", lambda record: record.request_cancel(now_s=1.0)) is None


def test_entries_of_streams_that_are_none_are_left_out(
    records: Records, connection: redis.Redis, caplog: pytest.LogCaptureFixture
) -> None:
    cursor, _ = records.changes(None, wait_s=0.01)
    connection.xadd("gradbox:changes", {"strange": "entry"})
    begin(records, "job1")
    assert [json.loads(event.data)["state"] for event in records.events("job1")] == [
        "queued",
        "running",
    ]
    _, changes = records.changes(cursor, wait_s=1.0)
    assert [change.job_id for change in changes] == ["job1"]
    assert "strange" in caplog.text


def test_what_is_no_announcement_does_not_hide_the_workers(
    redis_box: Box, connection: redis.Redis
) -> None:
    connection.sadd("gradbox:workers", "odd")
    connection.set("gradbox:worker:odd", b"\xff not JSON")
    assert [worker.name for worker in redis_box.backing.fleet.workers()] == ["worker-1"]
    assert redis_box.client.get("/readyz").status_code == 200


def test_what_is_no_description_of_a_model_is_no_model(
    redis_box: Box, connection: redis.Redis
) -> None:
    name = next(iter(connection.hkeys("gradbox:models"))).decode()
    connection.hset("gradbox:models", name, "{")
    assert redis_box.client.get("/v1/models").json()["models"] == []


def test_a_turn_that_is_none_of_ours_is_passed_over(
    backing: Backing, connection: redis.Redis
) -> None:
    connection.rpush("rq:queue:gradbox", "strange")
    assert backing.turns.waiting() == []


def test_a_damaged_token_hides_no_other(redis_box: Box, connection: redis.Redis) -> None:
    connection.hset("gradbox:tokens", "0" * 64, "{")
    tokens = redis_box.backing.tokens
    assert [info.name for info in tokens.list()] == ["ann"]
    assert redis_box.client.get("/v1/jobs").status_code == 200
    assert tokens.revoke("ann") == 1


FAILED = ("the dispatcher failed",)


def test_threads_go_on_after_any_exception(
    redis_box: Box,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    records = redis_box.backing.records

    def fails(*_: object, **__: object) -> None:
        raise RuntimeError("a mistake of ours")

    with monkeypatch.context() as patched:
        patched.setattr(redis_box.backing.leadership, "hold", fails)
        patched.setattr(records, "changes", fails)
        give_up = time.monotonic() + 60.0
        while not all(any(part in told.message for told in caplog.records) for part in FAILED):
            assert time.monotonic() < give_up
            time.sleep(0.01)
    assert redis_box.client.get("/livez").status_code == 200
    submit(redis_box.client)
    give_up = time.monotonic() + 60.0
    while not redis_box.backing.turns.waiting():
        assert time.monotonic() < give_up
        time.sleep(0.01)
    told = [entry for entry in caplog.records if entry.levelno == logging.ERROR]
    assert all(any(part in entry.message for entry in told) for part in FAILED)
