"""A box that is paused hands out nothing; one that drains takes nothing either."""

from __future__ import annotations

import httpx
import pytest

from gradbox.protocol import OperationMode, OperationView
from gradbox_service.backing import Backing
from gradbox_service.queue.dispatch import Dispatcher
from tests.service.boxes import (
    SHARDS,
    announce,
    begin,
    blob_of,
    spec_for,
    submit,
    upload,
)
from tests.service.conftest import Box, client_with
from tests.service.test_dispatch import positions, queue, waiting

PAUSED = OperationView(mode=OperationMode.PAUSED, by="root", reason="new driver")


@pytest.fixture
def owner(box: Box) -> httpx.Client:
    return client_with(box.transport, box.backing.tokens.create("root", admin=True))


def order(client: httpx.Client, mode: str, reason: str = "") -> httpx.Response:
    return client.put("/v1/operation", json={"mode": mode, "reason": reason})


def test_a_paused_box_hands_out_nothing_until_it_is_resumed(backing: Backing) -> None:
    announce(backing, name="idle-1")
    announce(backing, name="idle-2")
    queue(backing.records, "a", "b")
    dispatcher = Dispatcher(backing)
    dispatcher.tick()
    assert waiting(backing) == ["a", "b"]
    for mode in (OperationMode.PAUSED, OperationMode.DRAINING):
        backing.operation.set(OperationView(mode=mode))
        dispatcher.tick()
        assert waiting(backing) == []
        assert positions(backing) == {"a": 1, "b": 2}
    backing.operation.set(OperationView())
    dispatcher.tick()
    assert waiting(backing) == ["a", "b"]


def test_a_place_says_that_the_box_is_paused(
    backing: Backing, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gradbox_service.queue.positions.PACE_S", 0.0)
    monkeypatch.setattr("gradbox_service.queue.positions.MAX_FRACTION", 1000.0)
    announce(backing)
    queue(backing.records, "a", "b")
    dispatcher = Dispatcher(backing)
    told = []
    for operation in (OperationView(), PAUSED, OperationView()):
        backing.operation.set(operation)
        dispatcher.tick()
        position = backing.records.positions()["b"]
        told.append((position.hold, position.seconds_left is None))
    assert told == [(None, False), (str(PAUSED), True), (None, False)]


def test_those_who_wait_are_told_who_paused_the_box_and_why(box: Box, owner: httpx.Client) -> None:
    waits, runs = submit(box.client), submit(box.client, seed=1)
    begin(box.backing.records, runs)
    assert order(owner, "paused", "new driver").json()["by"] == "root"
    assert box.client.get(f"/v1/jobs/{waits}").json()["hold"] == "paused by root: new driver"
    assert box.client.get(f"/v1/jobs/{runs}").json()["hold"] is None
    ready = box.client.get("/readyz").json()
    assert (ready["mode"], ready["reason"]) == ("paused", "new driver")
    listed = {job["id"]: job["hold"] for job in box.client.get("/v1/jobs").json()["jobs"]}
    assert listed == {waits: "paused by root: new driver", runs: None}
    assert order(owner, "running").json()["mode"] == "running"
    assert box.client.get(f"/v1/jobs/{waits}").json()["hold"] is None


def test_a_draining_box_refuses_new_jobs_with_the_reason(box: Box, owner: httpx.Client) -> None:
    order(owner, "draining", "moving house")
    with pytest.raises(AssertionError, match="moving house") as refused:
        submit(box.client)
    assert "urn:gradbox:problem:draining" in str(refused.value)
    refusal = box.client.get("/readyz")
    assert refusal.status_code == 503
    assert "moving house" in refusal.json()["detail"]
    assert int(refusal.headers["retry-after"]) > 30
    order(owner, "running")
    submit(box.client)


def test_only_the_owner_may_pause(box: Box) -> None:
    assert order(box.client, "paused").status_code == 403
    assert box.client.get("/v1/operation").json()["mode"] == "running"
    assert client_with(box.transport, "").get("/v1/operation").status_code == 401


def test_a_draining_box_gives_the_job_that_was_posted_before(box: Box, owner: httpx.Client) -> None:
    upload(box.client, SHARDS)
    spec, key = spec_for(blob_of(SHARDS)[0]), {"Idempotency-Key": "once"}
    first = box.client.post("/v1/jobs", json=spec, headers=key)
    order(owner, "draining")
    assert box.client.post("/v1/jobs", json=spec, headers=key).json()["id"] == first.json()["id"]
    other = box.client.post("/v1/jobs", json=spec | {"seed": 9}, headers=key)
    assert other.json()["type"].endswith("idempotency-conflict")
