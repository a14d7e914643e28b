"""Over the bound of its memory a Redis takes no new jobs, but what makes room and what must end."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import redis

from gradbox.protocol import JobState, OperationMode
from gradbox_service.admission import posting
from gradbox_service.backing import Backing
from gradbox_service.fleet import WorkerPresence
from gradbox_service.jobs import JobRecord, Turn
from gradbox_service.queue import dispatch
from gradbox_service.queue.dispatch import Dispatcher
from gradbox_service.settings import MIB, Settings
from tests.service.boxes import (
    SHARDS,
    a_record,
    a_spec,
    announce,
    begin,
    finish,
    spec_for,
    submit,
    upload,
)
from tests.service.conftest import Box, client_with, serve
from tests.service.test_cleaning import cleaner_of, put_blob, put_result


@pytest.fixture
def backing(redis_settings: Settings) -> Backing:
    return Backing.on_redis(redis_settings)


@pytest.fixture
def box(backing: Backing, redis_settings: Settings) -> Iterator[Box]:
    yield from serve(backing, redis_settings)


def fill(connection: redis.Redis) -> None:
    """Let Redis have more memory than it may."""
    connection.config_set("maxmemory", 1)


@pytest.fixture(autouse=True)
def roomy_again(connection: redis.Redis) -> Iterator[None]:
    yield
    connection.config_set("maxmemory", 0)


def state_of(backing: Backing, job_id: str) -> JobState:
    record = backing.records.get(job_id)
    assert record is not None
    return record.state


def test_accepted_jobs_beat_and_end_and_new_ones_are_refused(
    backing: Backing, connection: redis.Redis
) -> None:
    for job_id in ("waits", "done", "given-back"):
        backing.records.create(a_record(job_id), spec=a_spec())
    begin(backing.records, "done", lease_s=0.001)
    begin(backing.records, "given-back")
    fill(connection)
    time.sleep(0.01)
    assert backing.records.beat("done", attempt=1, lease_s=60.0) is not None
    assert backing.records.leased("done", attempt=1)
    finish(backing, "done", attempt=1, data=b"result")
    give_back = partial(JobRecord.release, attempt=1, now_s=time.time())
    backing.records.update("given-back", give_back)
    backing.records.update("waits", partial(JobRecord.request_cancel, now_s=time.time()))
    assert state_of(backing, "done") is JobState.DONE
    assert state_of(backing, "given-back") is JobState.QUEUED
    assert state_of(backing, "waits") is JobState.CANCELLED
    with pytest.raises(redis.OutOfMemoryError):
        backing.records.create(a_record("new"), spec=a_spec())


def test_results_blobs_and_records_are_removed(
    backing: Backing, connection: redis.Redis, tmp_path: Path
) -> None:
    put_blob(backing, days=99)
    put_result(backing, "unused", days=99)
    put_result(backing, "ended")
    fill(connection)
    cleaner = cleaner_of(backing, tmp_path / "data", clean_every_s=0.01)
    cleaner.start()  # a process that was started over the bound comes to lead all the same
    try:
        give_up = time.monotonic() + 30
        while backing.owners.totals() or backing.records.result_bytes() != {"ann": 6}:
            assert time.monotonic() < give_up
            time.sleep(0.01)
    finally:
        cleaner.close()
        cleaner.join()
    backing.records.forget("ended")
    assert backing.records.get("ended") is None
    assert dict(backing.records.result_bytes()) == {}


def test_a_worker_stays_known(backing: Backing, connection: redis.Redis) -> None:
    fill(connection)
    backing.fleet.announce(WorkerPresence(name="w", device="cpu", state="idle"), ttl_s=60.0)
    assert [worker.name for worker in backing.fleet.workers()] == ["w"]
    backing.fleet.retire("w")
    assert list(backing.fleet.workers()) == []


def test_the_owner_makes_tokens(backing: Backing, connection: redis.Redis) -> None:
    fill(connection)
    assert backing.tokens.find(backing.tokens.create("ann")) is not None


@pytest.mark.parametrize("fed", [False, True])
def test_a_lost_job_is_put_back_while_others_wait(
    fed: bool, backing: Backing, connection: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "REFUSED_GRACE_S", 1.0)
    for job_id in ("lost", "waits"):
        backing.records.create(a_record(job_id), spec=a_spec())
    begin(backing.records, "lost", lease_s=0.001)
    if fed:
        backing.turns.feed(Turn("waits", 1))
    fill(connection)
    dispatcher = Dispatcher(backing)
    dispatcher.start()
    try:
        give_up = time.monotonic() + 30
        while state_of(backing, "lost") is not JobState.QUEUED:
            assert time.monotonic() < give_up
            time.sleep(0.01)
    finally:
        dispatcher.close()
        dispatcher.join()


def test_a_job_that_waits_gets_a_turn_that_a_worker_takes(
    backing: Backing, connection: redis.Redis
) -> None:
    backing.records.create(a_record("waits"), spec=a_spec())
    fill(connection)
    announce(backing)
    dispatcher = Dispatcher(backing)
    for _ in range(2):  # positions, which are not stored, keep it from nothing
        dispatcher.tick()
        assert dispatcher.leads
    assert backing.turns.take(wait_s=1) == Turn("waits", 1)
    assert begin(backing.records, "waits").attempt == 1


def test_jobs_of_one_owner_leave_room_for_those_of_others(
    box: Box, connection: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(posting, "MEMORY_S", 0.0)
    connection.config_set("maxmemory", 32 * MIB)
    blob = upload(box.client, SHARDS)
    large = {"inputs": [{"shards": 5000 * [{"blob": blob, "prefix": "0/"}]}]}
    clients = [box.client, box.client_of("bob"), box.client_of("eve")]
    for client in clients:
        upload(client, SHARDS)
        while (answer := client.post("/v1/jobs", json=spec_for(blob, **large))).is_success:
            pass
        assert answer.json()["type"].endswith("queue-full"), answer.text
        assert "the specs of your jobs that wait or run take" in answer.json()["detail"]
        assert client.get("/readyz").json()["refuses"] == ""
    memory = box.backing.records.memory()
    assert memory.used_bytes < 0.8 * 32 * MIB
    # Whoever has not many may post on, who has as much as is left once some have ended.
    submit(box.client_of("ann2"))
    for job_id in box.backing.records.active_ids():
        box.client.delete(f"/v1/jobs/{job_id}")
    submit(box.client)


def test_users_cancel_and_delete_and_the_owner_pauses(box: Box, connection: redis.Redis) -> None:
    owner = client_with(box.transport, box.backing.tokens.create("root", admin=True))
    waits, ended = submit(box.client), submit(box.client, seed=1)
    begin(box.backing.records, ended)
    finish(box.backing, ended, attempt=1, data=b"result")
    fill(connection)
    assert box.client.get(f"/v1/jobs/{waits}").json()["state"] == "queued"
    assert box.client.delete(f"/v1/jobs/{waits}").json()["state"] == "cancelled"
    assert box.client.delete(f"/v1/jobs/{ended}/result").status_code < 300
    assert box.backing.records.result_bytes() == {}
    paused = owner.put("/v1/operation", json={"mode": "paused"})
    assert paused.json()["mode"] == "paused"
    assert box.backing.operation.read().mode is OperationMode.PAUSED
